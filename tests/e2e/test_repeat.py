"""Steps that are lost as over `ipc` and repeated, in a real engine: the tokens are those of a run without a loss."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE
from tests.e2e.sameness import logprob_difference, tokens_of
from tests.e2e.servers import MODELS

PLANS: dict[str, dict[str, str]] = {
    "the first chunks of prompts": {"1": "raised"},
    "the chunk after them": {"2": "late"},
    "a decode": {"9": "late"},
    "a decode, in mid-layer": {"12": "raised"},
    "the repeat, and its repeat": {"6": "late", "7": "raised", "8": "late"},
}


def run(folder: Path, *, asynchronous: bool, runs_all: bool = False) -> "subprocess.CompletedProcess[bytes]":
    """One engine with all plans; its log is in the folder."""
    spec = {"model": str(MODELS / "qwen3-moe"), "async": asynchronous, "engine": ENGINE, "plans": PLANS}
    (folder / "spec.json").write_text(json.dumps(spec | {"runs_all": runs_all}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    command = [sys.executable, "-m", "tests.e2e.losing", "spec.json", "out.json"]
    with (folder / "log").open("wb") as log:
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        return subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=300)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.full), True], ids=["sync", "async"])
def test_lost_steps_are_repeated_and_nobody_sees_it(tmp_path: Path, asynchronous: bool) -> None:
    assert run(tmp_path, asynchronous=asynchronous).returncode == 0, (tmp_path / "log").read_text()[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert found["async"] is asynchronous
    for name, plan in PLANS.items():
        seen = found["plans"][name]
        assert seen["left"] == 0 and len(seen["rows"]) == len(plan), name
        assert tokens_of(seen["outputs"]) == tokens_of(found["clean"]), name
        assert logprob_difference(seen["outputs"], found["clean"]) == 0.0, name
    assert found["seeded"] == ["error"] * 3  # runner V1 has used up their random numbers
    assert tokens_of(found["again"]) == tokens_of(found["clean"])


@pytest.mark.full
def test_a_step_on_top_of_a_lost_prompt_would_embed_the_token_minus_one(tmp_path: Path) -> None:
    """Negative control: what happens where such a step is run."""
    assert run(tmp_path, asynchronous=True, runs_all=True).returncode != 0
    assert "index out of range" in (tmp_path / "log").read_text()
