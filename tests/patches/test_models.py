"""The model table, its page in the docs and its place in the manifest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from afdpatch.patches.models import tables
from afdpatch.registry import Manifest, packaged_manifest
from afdpatch.runtime.config import ConfigError

ROOT = Path(__file__).parents[2]


def cli(form: str) -> str:
    """What `afdpatch models` prints."""
    command = [sys.executable, "-m", "afdpatch", "models", "--format", form]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_docs_page_shows_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for part in cli("markdown").strip().split("\n\n"):
        assert part in page


def test_json_and_text_show_every_model_and_every_refusal() -> None:
    data = json.loads(cli("json"))
    assert {row["architecture"] for row in data["models"]} == tables().models.keys()
    assert {row["id"] for row in data["refused"]} == tables().refused.keys()
    assert all(row.architecture in cli("text") for row in tables().models.values())


def test_each_row_is_pinned_by_its_seam_and_its_classes_are_relied_on() -> None:
    entries = {entry.id: entry for entry in Manifest.read(packaged_manifest("afdpatch.manifests", "afd")).entries}
    for row in tables().models.values():
        relied = {symbol.rsplit(".", 1)[0] for symbol in entries[row.seam].relies}
        assert set(row.ffn_classes) <= relied


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", "ffn"),
        ("model.layers.11.mlp.gate.weight", "ffn"),
        ("model.layers.0.post_attention_layernorm.weight", "attention"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.embed_tokens.weight", "attention"),
        ("lm_head.weight", "attention"),
        ("draft.model.layers.0.mlp.gate.weight", "attention"),
    ],
)
def test_who_holds_a_tensor(name: str, owner: str) -> None:
    for row in tables().models.values():
        assert row.owner(name) == owner


def test_an_architecture_without_a_row_is_refused_with_the_rows_there_are() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM") as error:
        tables().row(["LlamaForCausalLM"])
    assert "Qwen3MoeForCausalLM" in str(error.value)
