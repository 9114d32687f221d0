"""The digest by which the two roles agree on their weights."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afdpatch.patches.checkpoint import digest

MODEL = Path(__file__).parents[1] / "models" / "qwen3-moe"
pytestmark = pytest.mark.e2e


@dataclass
class Config:
    """What the digest reads of vLLM's configurations."""

    model: str = str(MODEL)
    seed: int = 0
    revision: str | None = None
    load_format: str = "auto"
    hf_config: Any = field(default_factory=SimpleNamespace)

    @property
    def digest(self) -> str:
        """The digest."""
        return digest(self, self)  # type: ignore[arg-type]


def changed(folder: Path, name: str) -> str:
    """A copy of the checkpoint whose tensor `name` is another."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "copy")
    assert Config(str(tmp_path / "copy")).digest == Config().digest


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
)
def test_one_other_tensor_is_another_digest_though_names_and_sizes_are_the_same(tmp_path: Path, name: str) -> None:
    assert Config(changed(tmp_path / "tuned", name)).digest != Config().digest


def test_dummy_weights_are_no_checkpoint_and_the_seed_counts() -> None:
    dummy = Config(load_format="dummy")
    assert dummy.digest != Config().digest
    assert dummy.digest != Config(load_format="dummy", seed=1).digest


def test_a_hubs_name_counts_with_its_revision() -> None:
    assert Config("org/model").digest != Config("org/model", revision="v2").digest
    assert Config("org/model", hf_config=SimpleNamespace(_commit_hash="abc")).digest == "org/model at abc"
