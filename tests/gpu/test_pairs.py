"""AFD pairs on two GPUs give what stock vLLM gives; see tests/gpu/matrix.py. Some ten minutes on a fresh machine."""

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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the matrix."""
    folder = tmp_path_factory.mktemp("matrix")
    command = [sys.executable, "-m", "tests.gpu.matrix", str(folder), "--seconds", "900", "--two", "qwen3-moe"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=950)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_every_pair_is_equal_to_stock_vllm_and_survives_its_peers_death(results: dict[str, Any]) -> None:
    assert faults(results) == []
    compared = [name for name, result in results.items() if isinstance(result, dict) and "equal" in result]
    assert len(compared) == 10  # two models, two runners, eager and graphs; two attention servers
    assert sum(name.endswith("-survive") for name in results) == 8


def test_both_sides_counted_the_same_hops(results: dict[str, Any]) -> None:
    for model in ("qwen3-moe", "deepseek-v2"):
        for runner in ("v1", "v2"):
            eager, graph = (results[f"{model}-{runner}-{mode}"] for mode in ("eager", "graph"))
            counted = [result["ffn hops"] for result in (eager, graph)]
            assert counted == [eager["hops"], eager["hops"] + graph["hops"]]
