"""The walk over a git history: who broke what, and that nothing is parsed twice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from afdpatch.cli import bisect as bisect_command
from afdpatch.cli import compat as compat_command
from afdpatch.cli.pin import schema_path
from afdpatch.registry import Lock, lock_path
from afdpatch.registry.gitfiles import GitRepository
from afdpatch.registry.history import Walk
from tests.registry.conftest import World, command
from tests.registry.test_census import LONG
from tests.registry.test_sources import ROOT, git, wheel


class History:
    """A repository made of a world's package, one commit for each change."""

    def __init__(self, world: World) -> None:
        self.world = world
        git(world.site, "init", "--quiet", "--initial-branch=main")
        self.commits: dict[str, str] = {}
        self.repo = world.site

    def commit(self, name: str) -> str:
        git(self.world.site, "add", "--all", self.world.package)
        git(self.world.site, "commit", "--quiet", "--allow-empty", "-m", name)
        self.commits[name] = git(self.world.site, "rev-parse", "HEAD")
        return self.commits[name]

    def bisect(self, capsys: pytest.CaptureFixture[str], selection: str) -> dict[str, Any]:
        capsys.readouterr()
        code = self.run(selection, "--format", "json")
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert result["exit_code"] == code
        jsonschema.validate(result, json.loads(schema_path("bisect").read_text(encoding="utf-8")))
        return result

    def run(self, selection: str, *options: str) -> int:
        manifest = ("--manifest", str(self.world.manifest))
        return command(bisect_command, "bisect", *manifest, "--repo", str(self.repo), selection, *options)


def firsts(result: dict[str, Any]) -> dict[str, str | None]:
    return {item["id"]: item["commit"] and item["commit"]["subject"] for item in result["patches"]}


@pytest.fixture
def history(world: World) -> History:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.write(f"{world.package}/long.py", LONG.replace("NAME", "compute"))
    world.declare(
        world.entry(holders=["PKG.user"], relies=["PKG.core:LIMIT"]),
        world.entry("PKG.core:Engine.run"),
        world.entry("PKG.core:Engine.name"),
        world.entry("PKG.long:compute", kind="official"),
    )
    assert world.pin() == 0
    made = History(world)
    made.commit("good")
    return made


def test_each_patch_s_first_breaking_commit_is_named(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    world = history.world
    world.core("# a comment", "# another")
    history.commit("comment")
    world.core("(2 if twice else 1)", "(3 if twice else 1)")
    history.commit("run")
    world.write(f"{world.package}/unrelated.py", "x = 1\n")
    history.commit("unrelated")
    (world.site / world.package / "long.py").rename(world.site / world.package / "longer.py")
    history.commit("move")
    world.write(f"{world.package}/fresh.py", "from .core import free\n")
    history.commit("holder")
    world.core("LIMIT = 3", "LIMIT = 4")
    history.commit("limit")
    result = history.bisect(capsys, f"{history.commits['good']}..main")
    assert firsts(result) == {
        "core.free": "holder",
        "core.engine-run": "run",
        "core.engine-name": None,
        "core.compute": "move",
    }
    by_id = {item["id"]: item for item in result["patches"]}
    assert [by_id[name]["standing"] for name in by_id] == ["interface", "body", "same", "moved"]
    assert by_id["core.compute"]["parts"][0]["detail"].startswith(f"now {world.package}.longer:compute")
    assert by_id["core.engine-run"]["commit"]["name"] == history.commits["run"]
    assert result["exit_code"] == 3


@pytest.mark.parametrize("subject", ["a\x1eb", "a\x1e" + "0" * 40, ":100644 100644"])
def test_what_a_commit_s_author_writes_hides_nothing(
    history: History, capsys: pytest.CaptureFixture[str], subject: str
) -> None:
    history.world.core("(2 if twice else 1)", "(3 if twice else 1)")
    history.commit(subject)
    assert firsts(history.bisect(capsys, f"{history.commits['good']}..main"))["core.engine-run"] == subject


def test_a_subject_that_is_no_utf8_is_shown(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    site = history.world.site
    history.world.core("def name(", "def named(")
    history.commit("cafe")
    raw = git(site, "cat-file", "commit", "HEAD").encode().replace(b"\ncafe", b"\ncaf\xe9\n")
    (site / "raw").write_bytes(raw)
    name = git(site, "hash-object", "-t", "commit", "-w", "raw")
    for option in ("text", "markdown", "json"):
        capsys.readouterr()
        assert history.run(f"{history.commits['good']}..{name}", "--format", option) == 3
        assert "caf\ufffd" in capsys.readouterr().out.replace("\\ufffd", "\ufffd")


def holding(result: dict[str, Any]) -> set[str]:
    return {part["symbol"] for part in result["patches"][0]["parts"]}


@pytest.mark.parametrize("how", ["renamed", "unchanged", "star"])
def test_a_holder_is_found_as_compat_finds_it(world: World, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """In a file that the commit doesn't change, and under another name than the target's."""
    file, before, after = {
        "renamed": ("b", "", "from .a import f\n"),
        "unchanged": ("e", "def g(): ...\n", "from .core import free as g\n"),
        "star": ("d", "", "from .core import free\n"),
    }[how]
    sources = {"a": "from .core import free as f\n", "b": "", "c": "from .d import *\n", "d": "", "e": "def g(): ...\n"}
    for name, text in {**sources, "f": "from .e import g\n", "h": "from .a import f\n", file: before}.items():
        world.write(f"{world.package}/{name}.py", text)
    world.declare(world.entry(when="always"))
    assert world.pin() == 0
    history = History(world)
    good = history.commit("good")
    world.write(f"{world.package}/{file}.py", after)
    history.commit("bad")
    history.commit("later")
    result = history.bisect(capsys, f"{good}..main")
    manifest = ("--manifest", str(world.manifest))
    assert command(compat_command, "compat", *manifest, f"git:{world.site}@HEAD", "--format", "json") == 4
    expected = json.loads(capsys.readouterr().out)["releases"][0]
    assert (firsts(result), result["exit_code"]) == ({"core.free": "bad"}, 4)
    assert holding(result) == holding(expected)


def test_a_package_that_moves_in_its_repository_is_followed(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    world, site = history.world, history.world.site
    good, package = history.commits["good"], world.package
    git(site, "rm", "--quiet", "--cached", "-r", package)
    git(site, "commit", "--quiet", "-m", "away")
    (site / "src").mkdir()
    (site / package).rename(site / "src" / package)
    git(site, "add", "src")
    git(site, "commit", "--quiet", "-m", "to src")
    assert set(firsts(history.bisect(capsys, f"{good}..HEAD")).values()) == {"away"}
    assert history.run(f"{good}..HEAD") == history.run("HEAD..HEAD") == 0
    core = site / "src" / package / "core.py"
    core.write_text(core.read_text().replace("* scale", "* scale * 2"))
    git(site, "commit", "--quiet", "-am", "break")
    assert firsts(history.bisect(capsys, "HEAD~1..HEAD")) == {
        "core.free": "break",
        "core.engine-run": None,
        "core.engine-name": None,
        "core.compute": None,
    }


def test_what_a_link_leads_to_is_walked_over(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    world, site = history.world, history.world.site
    core = site / world.package / "core.py"
    core.rename(site / "shared.py")
    core.symlink_to("../shared.py")
    git(site, "add", "shared.py")
    history.commit("a link")
    (site / "shared.py").write_text((site / "shared.py").read_text().replace("* scale", "* scale * 2"))
    git(site, "add", "shared.py")
    history.commit("break")
    assert firsts(history.bisect(capsys, f"{history.commits['good']}..main"))["core.free"] == "break"


def test_a_repaired_patch_is_same_at_the_end(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    world = history.world
    world.core("(2 if twice else 1)", "(3 if twice else 1)")
    history.commit("break")
    world.core("(3 if twice else 1)", "(2 if twice else 1)")
    history.commit("repair")
    result = history.bisect(capsys, f"{history.commits['good']}..HEAD")
    assert firsts(result)["core.engine-run"] == "break"
    assert (result["exit_code"], result["patches"][1]["last"]) == (0, "same")


@pytest.mark.parametrize("setting", ["", "log.diffMerges=dense-combined", "diff.relative=true"])
def test_a_merge_counts_as_one_commit(history: History, capsys: pytest.CaptureFixture[str], setting: str) -> None:
    """And the user's settings of git change nothing, in a folder of the repository either."""
    world, site = history.world, history.world.site
    history.repo = site / world.package
    if setting:
        git(site, "config", *setting.split("="))
    git(site, "checkout", "--quiet", "-b", "side")
    world.core("def name(", "def named(")
    history.commit("on the side")
    git(site, "checkout", "--quiet", "main")
    world.write(f"{world.package}/unrelated.py", "x = 1\n")
    history.commit("on main")
    git(site, "merge", "--quiet", "--no-ff", "-m", "merge", "side")
    assert firsts(history.bisect(capsys, f"{history.commits['good']}..main"))["core.engine-name"] == "merge"


def test_a_release_s_branch_is_left_for_the_main_line(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    """The pinned release has a fix that main gets later: main is broken at first, then whole, then broken."""
    world, site = history.world, history.world.site
    git(site, "checkout", "--quiet", "-b", "release")
    world.core("(2 if twice else 1)", "(5 if twice else 1)")
    history.commit("fix for the release")
    assert world.pin() == 0
    git(site, "checkout", "--quiet", "main")
    world.core("(2 if twice else 1)", "(5 if twice else 1)")
    history.commit("fix")
    world.core("def name(", "def named(")
    history.commit("named")
    result = history.bisect(capsys, "release..main")
    assert result["branched_off"] and result["start"]["name"] == history.commits["good"]
    assert firsts(result) == {
        "core.free": None,
        "core.engine-run": None,
        "core.engine-name": "named",
        "core.compute": None,
    }
    world.core("(5 if twice else 1)", "(6 if twice else 1)")
    history.commit("other")
    assert firsts(history.bisect(capsys, "release..main"))["core.engine-run"] == "other"


def test_what_is_broken_at_the_start_is_told_as_such(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    world = history.world
    world.core("def name(", "def named(")
    history.commit("before")
    history.commit("empty")
    item = history.bisect(capsys, f"{history.commits['before']}..main")["patches"][2]
    assert (item["at_start"], item["commit"]["subject"], item["standing"]) == (True, "before", "moved")


def test_unchanged_files_cost_nothing(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parses as there are versions of the files that symbols are found in, however long the history is."""
    world = history.world
    for number in range(30):
        world.write(f"{world.package}/unrelated.py", f"x = {number}\n")
        history.commit(f"unrelated {number}")
    world.core("(2 if twice else 1)", "(3 if twice else 1)")
    history.commit("one")
    world.core("(3 if twice else 1)", "(4 if twice else 1)")
    history.commit("two")
    world.core("(4 if twice else 1)", "(3 if twice else 1)")
    history.commit("one again")
    parsed: list[str] = []
    parse = ast.parse

    def counting(data: Any, filename: str = "", *rest: Any, **options: Any) -> Any:
        parsed.append(filename)
        return parse(data, filename, *rest, **options)

    monkeypatch.setattr(ast, "parse", counting)
    walk = Walk(Lock.read(lock_path(world.manifest, "1.0")), GitRepository(world.site))
    walk.run(history.commits["good"], "main")
    package = world.package
    assert sorted(parsed) == sorted([f"{package}/core.py"] * 3 + [f"{package}/long.py", f"{package}/user.py"])
    assert walk.counts.commits == 34
    assert len(walk._parsed) <= 3, "syntax trees of former versions aren't kept"
    assert walk.counts.looked == 5 + 4 * 2, (
        "five symbols at the start, and the four of core.py at each new version of it"
    )


def test_errors_end_with_two(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    good = history.commits["good"]
    for selection in ("main", "..main", "main..", f"{good}...main", f"{good}..none"):
        assert history.run(selection) == 2, selection
    assert "has no commit 'none'" in capsys.readouterr().err
    later = history.commit("later")
    assert history.run(f"{later}..{good}") == 2
    assert "write the older end first" in capsys.readouterr().err
    git(history.world.site, "checkout", "--quiet", "--orphan", "alone")
    history.commit("alone")
    assert history.run("main..alone") == 2


def test_text_and_markdown_name_the_commit(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    history.world.core("def name(", "def named(")
    commit = history.commit("named | so")
    for option in ("text", "markdown"):
        capsys.readouterr()
        assert history.run(f"{history.commits['good']}..main", "--format", option) == 3
        out = capsys.readouterr().out
        assert commit[:12] in out and "never broken" in out and "2 commits" in out
    assert "named \\| so" in out


def test_a_history_is_made_from_wheels(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    world.declare(world.entry("PKG.core:Engine.name"), world.entry("PKG.core:Engine.run"))
    assert world.pin() == 0
    wheels = [wheel(world, "1.0")]
    world.core("def name(", "def named(")
    world.write(f"{world.package}/deep/__init__.py", "")
    (world.site / world.package / "_version.py").unlink()
    wheels.append(wheel(world, "1.1"))
    repo = tmp_path / "history.git"
    script = ROOT / ".ci" / "wheel_history.py"
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    subprocess.run([sys.executable, str(script), str(repo), *wheels], check=True, env=env)
    manifest = ("--manifest", str(world.manifest))
    capsys.readouterr()
    assert command(bisect_command, "bisect", *manifest, "--repo", str(repo), "v1.0..v1.1", "--format", "json") == 3
    result = json.loads(capsys.readouterr().out)
    assert firsts(result) == {"core.engine-name": f"1.1: {world.package}", "core.engine-run": None}
