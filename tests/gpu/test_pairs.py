"""AFD pairs on two GPUs give what stock vLLM gives, and go on when a role is killed; see tests/gpu/matrix.py.

Two runs of seven to ten minutes each on a fresh machine: `-k equal` and `-k killed`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.judge import faults

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CHAINS = [f"{model}-{runner}" for model in ("qwen3-moe", "deepseek-v2") for runner in ("v1", "v2")]
MODES = ("eager", "graph", "pieces", "only-pieces")


def matrix(folder: Path, *options: str) -> dict[str, Any]:
    """The results of one run of the matrix."""
    command = [sys.executable, "-m", "tests.gpu.matrix", str(folder), *options]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=False, timeout=950)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every mode beside stock vLLM, two attention servers at one FFN server, and hidden states in 8 bits."""
    more = ("--losses", "", "--two", "qwen3-moe", "--fp8", "qwen3-moe,deepseek-v2")
    return matrix(tmp_path_factory.mktemp("compared"), "--seconds", "560", *more)


def test_every_pair_is_equal_to_stock_vllm(compared: dict[str, Any]) -> None:
    assert faults(compared) == []
    equal = {name for name, result in compared.items() if isinstance(result, dict) and "equal" in result}
    two = {f"qwen3-moe-two-{mode}-{rank}" for mode in ("graph", "pieces") for rank in (0, 1)}
    assert equal == {f"{chain}-{mode}" for chain in CHAINS for mode in MODES} | two
    assert {"qwen3-moe-merged-0", "qwen3-moe-merged-1", "qwen3-moe-merged-hops"} <= compared.keys()
    assert {f"{chain}-padding" for chain in CHAINS} <= compared.keys()
    assert {f"{model}-fp8-{mode}" for model in ("qwen3-moe", "deepseek-v2") for mode in MODES[:2]} <= compared.keys()


def test_each_pair_was_looked_at_with_zeroed_ffns_and_counted_on_both_sides(compared: dict[str, Any]) -> None:
    for name in (f"{chain}-{mode}" for chain in CHAINS for mode in MODES):
        assert {"zero unnoticed", "hops", "ffn hops"} <= compared[name].keys()


def test_a_killed_role_is_noticed_and_lost_steps_are_repeated(tmp_path: Path) -> None:
    lost = matrix(tmp_path / "lost", "--seconds", "580", "--cases", "", "--losses", "eager,graph,pieces")
    assert faults(lost) == []
    for kind in ("kill-attention", "survive"):
        expected = {f"{chain}-{mode}-{kind}" for chain in CHAINS for mode in MODES[:3]}
        assert {name for name in lost if name.endswith(kind)} == expected
    assert {result["logprobs differ"] for name, result in lost.items() if name.endswith("survive")} == {0.0}
