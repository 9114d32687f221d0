"""vLLM's default compile mode on CPU: the hop is an opaque op in the compiled model."""

from pathlib import Path

import pytest

from tests.e2e.conftest import compare
from tests.e2e.sameness import logprob_difference, tokens_of
from tests.e2e.servers import MODELS

CASES = ["batch:1", "batch:16", "chunked", "seeded"]


@pytest.mark.parametrize("model", ["qwen3-moe", pytest.param("deepseek-v2", marks=pytest.mark.full)])
def test_a_compiled_afd_model_agrees_with_a_compiled_model_that_calls_its_ffns_through_the_op(
    tmp_path: Path, model: str
) -> None:
    pair = compare(MODELS / model, "bfloat16", CASES, tmp_path, enforce_eager=False)
    for name in ("stock", "afd"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "Warming up model for the compilation" in log
        assert "DYNAMO_TRACE_ONCE" in log
    for case in CASES:
        stock, afd = pair.stock["cases"][case], pair.afd["cases"][case]
        assert tokens_of(afd) == tokens_of(stock)
        assert logprob_difference(afd, stock) == 0.0
        assert tokens_of(pair.afd["zero"][case]) != tokens_of(stock)
    warm_up = 1  # one forward before the driver counts
    assert pair.ffn_hops == pair.layers * (pair.afd["all_steps"] + warm_up)
