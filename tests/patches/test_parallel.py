"""The workers of a tensor-parallel group, in processes of their own: one hops for all, all compute for one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, dict[str, Any]]]:
    """Exit code and words of both ranks."""
    store = tmp_path_factory.mktemp("group") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.patches.group", str(rank), str(store)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, json.loads(text.splitlines()[-1]))
        for process, text in zip(processes, outputs, strict=True)
    ]


def test_one_rank_hops_for_all_and_its_failure_is_that_of_all(ranks: list[tuple[int, dict[str, Any]]]) -> None:
    assert [said["hop"] for _, said in ranks] == [True, True]
    assert [said["failed hop"] for _, said in ranks] == ["NoFfnServer", "HopLost"]
    assert [said["hop after it"] for _, said in ranks] == [True, True]


def test_all_ranks_compute_what_the_first_is_asked(ranks: list[tuple[int, dict[str, Any]]]) -> None:
    (_, first), (_, second) = ranks
    assert first["ffn"] is True
    assert first["computed"] == second["computed"] == [[2, 4], [3, 1]]
    assert (first["beats"], second["beats"]) == (0, 3)  # one for each message, the idle one too
    assert first["died"] is second["died"] is False


def test_a_rank_that_dies_within_a_layer_ends_the_group(ranks: list[tuple[int, dict[str, Any]]]) -> None:
    assert ranks[1][0] == 7
    assert ranks[0][1]["lost"] is True
