"""Tokens and log-probabilities of an AFD pair are those of stock vLLM, and they come from the FFN server."""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Comparison, compare, engine_options, finish_driver, start_driver
from tests.e2e.sameness import logprob_difference, tokens_of
from tests.e2e.servers import MODELS

CASES = ["batch:1", "batch:2", "batch:5", "batch:16", "chunked", "prefix", "seeded", "stop", "abort"]
MIXED = "qwen3-moe-mixed"
"""Five layers of random strong weights, two of them dense."""
CONFIGURATIONS = [
    (MIXED, "bfloat16"),
    pytest.param(("qwen3-moe", "bfloat16"), marks=pytest.mark.full),  # the HTTP servers' tests have it in CI
    pytest.param(("qwen3-moe", "float32"), marks=pytest.mark.full),
    pytest.param(("qwen3-moe", "float16"), marks=pytest.mark.full),
    ("deepseek-v2", "bfloat16"),
    pytest.param(("deepseek-v2", "float32"), marks=pytest.mark.full),
    ("deepseek-v2", "float16"),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda c: "-".join(c))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """All cases of one configuration, run on stock vLLM and on an AFD pair."""
    model, dtype = request.param
    folder = tmp_path_factory.mktemp(f"{model}-{dtype}")
    path = MODELS / model
    if model == MIXED:
        path = folder / "model"
        make_strong_model(path, MODELS / "qwen3-moe", num_hidden_layers=5, mlp_only_layers=[0, 3])
    return compare(path, dtype, CASES, folder)


def make_strong_model(path: Path, like: Path, **changes: Any) -> None:
    """A checkpoint of random strong weights (1-D: 1.0; others normal * 1.5 / sqrt(fan in))."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(like, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(tensor.shape, generator=generator) * 1.5 / tensor.shape[-1] ** 0.5
            tensor.copy_(values if tensor.dim() > 1 else torch.ones(tensor.shape))
    model.save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | {"architectures": config["architectures"]}))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_stock_vllm_and_not_those_of_zeroed_ffns(pair: Comparison, case: str) -> None:
    stock, afd, zero = pair.stock["cases"][case], pair.afd["cases"][case], pair.afd["zero"][case]
    assert tokens_of(afd) == tokens_of(stock)
    assert afd == stock  # text, finish reasons and cached prompt tokens too
    assert logprob_difference(afd, stock) == 0.0
    assert tokens_of(zero) != tokens_of(stock)


def test_the_ffn_counted_exactly_the_hops_of_every_step(pair: Comparison) -> None:
    assert pair.stock["steps"] == pair.afd["steps"] > 100
    assert pair.ffn_hops == pair.layers * pair.afd["all_steps"]
    assert pair.ffn["afd_errors_total"] == 0


def test_switching_the_zeros_off_gives_the_tokens_back(pair: Comparison) -> None:
    first = CASES[0]
    assert pair.afd["again"][first] == pair.afd["cases"][first]


def test_the_cases_are_what_their_names_say(pair: Comparison, request: pytest.FixtureRequest) -> None:
    cases = pair.afd["cases"]
    mla = "deepseek" in request.node.name
    assert len({output["prompt"] for output in cases["batch:16"]}) > 8  # different lengths
    assert cases["chunked"][0]["prompt"] > 128
    assert (cases["prefix"][1][0]["cached"] > 0) is not mla  # on CPU vLLM has no prefix cache for MLA
    assert len(cases["seeded"][0]["choices"]) == 3
    assert len({tuple(choice["tokens"]) for choice in cases["seeded"][0]["choices"]}) > 1
    assert any(choice["finish"][0] == "stop" for output in cases["stop"] for choice in output["choices"])
    assert len(cases["abort"]) == 1


def test_each_role_allocates_and_reads_its_own_weights_and_both_are_the_whole(pair: Comparison) -> None:
    whole, attention, ffn = pair.stock["parameters"], pair.afd["parameters"], pair.ffn_parameters
    assert not attention.keys() & ffn.keys()
    assert attention | ffn == whole
    assert all(".mlp." in name for name in ffn)
    assert pair.ffn["afd_weight_bytes"] == sum(ffn.values())
    assert pair.ffn["afd_weight_tensors{read}"] + pair.ffn["afd_weight_tensors{skipped}"] == _tensors(pair)
    assert pair.afd["page"]["weights_read"] == pair.ffn["afd_weight_tensors{skipped}"]
    assert pair.afd["page"]["weights_skipped"] == pair.ffn["afd_weight_tensors{read}"]
    assert pair.afd["page"]["weight_bytes"] == sum(attention.values())


def _tensors(pair: Comparison) -> int:
    from safetensors import safe_open

    with safe_open(Path(pair.afd["model"]) / "model.safetensors", "pt") as file:
        return len(list(file.keys()))


@pytest.mark.parametrize("model", ["qwen3-moe", "deepseek-v2"])
def test_dummy_loading_allocates_each_roles_own_weights_too(tmp_path: Path, model: str) -> None:
    pair = compare(MODELS / model, "bfloat16", ["batch:1"], tmp_path, load_format="dummy")
    assert not pair.afd["parameters"].keys() & pair.ffn_parameters.keys()
    assert pair.afd["parameters"] | pair.ffn_parameters == pair.stock["parameters"]
    assert pair.ffn["afd_weight_bytes"] == sum(pair.ffn_parameters.values())
    assert pair.ffn["afd_weight_tensors{read}"] == pair.afd["page"]["weights_read"] == 0


def test_importing_afdpatch_with_afd_off_changes_no_token(tmp_path: Path) -> None:
    spec = {"model": str(MODELS / "qwen3-moe"), "cases": ["batch:5"], "engine": engine_options("", "bfloat16")}
    armed, plain = start_driver(spec | {"arm": True}, tmp_path, "armed"), start_driver(spec, tmp_path, "plain")
    seen = finish_driver(armed, tmp_path, "armed")["cases"]
    assert seen == finish_driver(plain, tmp_path, "plain")["cases"]
    assert seen["batch:5"][0]["choices"][0]["tokens"]
