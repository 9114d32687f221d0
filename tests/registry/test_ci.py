"""The scripts that CI runs: what fails there, and with which exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.registry.conftest import World
from tests.registry.test_bisect import History
from tests.registry.test_sources import ROOT

CI = ROOT / ".ci"


def script(
    world: World, name: str, *arguments: str, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(world.site), "MANIFEST": str(world.manifest)} | more
    return subprocess.run([str(CI / name), *arguments], capture_output=True, text=True, env=env, timeout=120, cwd=cwd)


@pytest.mark.parametrize(("answer", "code"), [("True", 6), ("False", 0), ("1/0", 1)])
def test_a_patch_that_is_not_needed_any_more_fails_ci(world: World, answer: str, code: int) -> None:
    world.write(f"{world.ours}/probes.py", f"def gone(): return {answer}\n")
    world.declare(world.entry(remove_when="OURS.probes:gone"), world.entry("PKG.core:Engine.run"))
    assert world.pin() == 0
    done = script(world, "patches", "--manifest", str(world.manifest))
    assert done.returncode == code, done.stderr
    assert ("obsolete" in done.stdout) == (code == 6)


@pytest.mark.parametrize(("tests", "patches", "code"), [(0, 0, 0), (2, 0, 2), (0, 6, 6), (2, 6, 2), (0, 1, 1)])
def test_ci_runs_both_and_a_failure_of_either_fails_it(tmp_path: Path, tests: int, patches: int, code: int) -> None:
    for name in ("run", "patches"):
        (tmp_path / ".ci").mkdir(exist_ok=True)
        shutil.copy(CI / name, tmp_path / ".ci" / name)
    stand_ins = {
        "bin/make": f"echo make $1\n[ $1 = env ] || {{ echo '== 3 passed in 1.00s =='; exit {tests}; }}",
        ".venv/bin/python": f"echo python $*\nexit {patches}",
    }
    for file, text in stand_ins.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / file).chmod(0o755)
    # No variable of GitHub's or of anybody else's is needed.
    env = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}"}
    done = subprocess.run([str(tmp_path / ".ci" / "run")], capture_output=True, text=True, env=env, cwd="/", timeout=60)
    assert done.returncode == code, done.stderr
    lines = ["make env", "python -m afdpatch verify --probe", "make test", "== 3 passed in 1.00s =="]
    assert done.stdout.splitlines() == lines
    assert (f"failed ({patches})" in done.stderr) == bool(patches)


def test_a_commit_is_compared_and_the_one_that_broke_a_patch_is_named(world: World, tmp_path: Path) -> None:
    world.declare(world.entry(), world.entry("PKG.core:Engine.run"))
    history = History(world)
    good = history.commit("good")
    world.declare(world.entry(), world.entry("PKG.core:Engine.run"), commit=good)
    assert world.pin() == 0
    history.commit("harmless")
    assert script(world, "vllm-compat", str(world.site)).returncode == 0
    world.core("* scale\n", "* scale + 1\n")
    broke = history.commit("breaks free")
    history.commit("later")
    summary = tmp_path / "summary.md"
    done = script(world, "vllm-compat", str(world.site), "main", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 4, done.stderr
    assert f"| core.free | {broke[:12]} |" in done.stdout and "breaks free" in done.stdout
    assert summary.read_text(encoding="utf-8") == done.stdout
    assert script(world, "vllm-compat", str(world.site), good).returncode == 0
    world.core("def run", "def ran")
    history.commit("gone")
    assert script(world, "vllm-compat", str(world.site), "main", good).returncode == 3


def test_a_checkout_does_not_shadow_what_is_installed(world: World, tmp_path: Path) -> None:
    history = History(world)
    world.declare(world.entry(), commit=history.commit("good"))
    assert world.pin() == 0
    (tmp_path / "afdpatch").mkdir()
    (tmp_path / "afdpatch" / "__init__.py").write_text("raise OSError('a part only')\n")
    assert script(world, "vllm-compat", str(world.site), cwd=tmp_path).returncode == 0


def test_the_verdict_stands_without_a_history(world: World, tmp_path: Path) -> None:
    history = History(world)
    history.commit("good")
    world.declare(world.entry())
    assert world.pin() == 0
    world.core("* scale\n", "* scale + 1\n")
    history.commit("broken")
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{world.site}", str(shallow)], check=True)
    assert script(world, "vllm-compat", str(shallow)).returncode == 4


def test_wrong_usage_ends_with_two(world: World) -> None:
    done = script(world, "vllm-compat")
    assert done.returncode == 2 and "CLONE" in done.stderr
    world.declare(world.entry())
    assert world.pin() == 0
    assert script(world, "vllm-compat", str(world.site.parent / "nowhere")).returncode == 2


def test_the_workflow_can_be_called_and_runs_the_script() -> None:
    folder = ROOT / ".github" / "workflows"
    flow: dict[Any, Any] = yaml.safe_load((folder / "vllm-compat.yml").read_text(encoding="utf-8"))
    inputs = flow[True]["workflow_call"]["inputs"]  # YAML 1.1 reads the key `on` as true.
    used = (folder / "vllm-compat.yml").read_text(encoding="utf-8")
    assert all(f"inputs.{name} }}}}" in used for name in inputs)
    steps = flow["jobs"]["compat"]["steps"]
    assert any(step.get("run", "").startswith(".ci/vllm-compat ") for step in steps)
    assert any(step.get("with", {}).get("fetch-depth") == 0 for step in steps)
    nightly = yaml.safe_load((folder / "vllm-nightly.yml").read_text(encoding="utf-8"))
    call = nightly["jobs"]["main"]
    assert call["uses"] == "./.github/workflows/vllm-compat.yml" and set(call["with"]) <= set(inputs)
