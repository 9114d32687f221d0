"""A plug-in that isn't ours: it declares a manifest, writes ten lines, and gets arming, verifying and listing."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

import afdpatch
from afdpatch.registry import Conflict, ManifestError, OtherVersion, PatchError, State, plugins
from tests.registry.conftest import World, command

# All that a plug-in has beside its patches: an entry point, and what it does once it knows its role.
ENTRY_POINT = "[afdpatch.manifests]\nNAME = OURS\n"
PLUGIN = """
from afdpatch.registry.plugins import patchset

def serve():
    with patchset("NAME").applied(role="red", process="worker"):
        import PKG.core
        return PKG.core.free(1)
"""


@pytest.fixture
def name(world: World) -> str:
    return f"theirs{world.ours.rpartition('_')[2]}"


def declare(world: World, name: str, distribution: str = "their-plug-in", package: str = "OURS") -> None:
    folder = Path(world.site, f"{distribution.replace('-', '_')}-1.0.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    text = ENTRY_POINT.replace("NAME", name).replace("OURS", package)
    (folder / "entry_points.txt").write_text(world.text(text))
    invalidate_caches()


def pinned(world: World, name: str, *entries: dict[str, object]) -> None:
    world.manifest = world.manifest.with_name(f"{name}.yaml")
    world.declare(*(entries or (world.entry(), world.entry("PKG.core:Engine.run", when="always"))), manifest=name)
    assert world.pin() == 0


def test_a_declared_manifest_is_armed_by_vllm_s_hook_verified_and_listed(world: World, name: str) -> None:
    declare(world, name)
    pinned(world, name)
    world.write(f"{world.ours}/__init__.py", PLUGIN.replace("NAME", name))
    assert name in [item.name for item in plugins.declared()]
    afdpatch.register()
    theirs = plugins.patchset(name)
    assert theirs is plugins.patchset(name)
    assert theirs.states() == {"core.free": State.IDLE, "core.engine-run": State.PENDING}
    assert world.load("PKG.core").Engine().run(1)[0] == "ours"
    assert theirs.verify().verdict.exit_code == 0
    assert world.load("OURS").serve() == ("ours", 8)
    assert world.load("PKG.core").free(1) == 8
    item = next(item for item in plugins.declared() if item.name == name)
    assert (item.path.name, item.distribution) == (f"{name}.yaml", "their-plug-in")
    assert item.path.is_file()
    theirs.undo()


def test_a_declared_manifest_that_does_not_fit_stops_vllm_s_start(world: World, name: str) -> None:
    declare(world, name)
    pinned(world, name)
    world.distribution("1.1")
    with pytest.raises(OtherVersion, match=r"1\.1"):
        afdpatch.register()


def test_a_manifest_for_a_package_that_is_not_installed_is_left_alone(world: World, name: str) -> None:
    declare(world, name)
    pinned(world, name)
    (world.site / world.package).rename(world.site / "elsewhere")
    invalidate_caches()
    afdpatch.register()


def test_an_unknown_name_and_a_name_declared_twice_are_errors(world: World, name: str) -> None:
    with pytest.raises(ManifestError, match="no manifest"):
        plugins.patchset(name)
    declare(world, name)
    declare(world, name, "another-plug-in", "other_package")
    with pytest.raises(Conflict, match=r"their-plug-in|another-plug-in"):
        plugins.declared()


@pytest.mark.parametrize("module", ["verify", "listing", "explain", "compat", "pin", "diff"])
def test_the_commands_take_a_declared_manifest_by_its_name(
    world: World, name: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(world, name)
    pinned(world, name)
    run = partial(command, import_module(f"afdpatch.cli.{module}"), "list" if module == "listing" else module)
    arguments = [*(["core.free"] if module in ("explain", "diff") else []), "--manifest"]
    capsys.readouterr()
    assert run(*arguments, name) == 0
    by_name = capsys.readouterr().out
    assert run(*arguments, str(world.manifest)) == 0
    assert capsys.readouterr().out == by_name != ""
    assert run(*arguments, "theirs-too") == 2
    assert f"no manifest 'theirs-too' is declared; expected: one of: {name}" in capsys.readouterr().err


def test_a_path_goes_before_a_declared_name(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = plugins.manifest_file("afd")
    assert own.name == "afd.yaml" and own.is_file()
    for path in ("afd.yaml", "./afd", "folder/afd.yml"):
        assert plugins.manifest_file(path) == Path(path)
    monkeypatch.chdir(tmp_path)
    Path("afd").write_text("")
    assert plugins.manifest_file("afd") == Path("afd")


def test_declared_sets_are_armed_in_the_order_of_their_after(world: World, name: str) -> None:
    first, second = f"z{name}", f"a{name}"
    pinned(world, first, world.entry(when="always", id="below"))
    pinned(world, second, world.entry(when="always", id="above", after=[f"{first}/below"]))
    folder = world.site / world.ours / "locks"
    assert len(list(folder.glob("*.json"))) == 1
    # One package has one folder of locks for a release: give each manifest its own.
    for manifest in (first, second):
        package = world.site / f"{world.ours}_{manifest}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / f"{manifest}.yaml").write_text((world.site / world.ours / f"{manifest}.yaml").read_text())
        world.manifest = package / f"{manifest}.yaml"
        assert world.pin() == 0
        declare(world, manifest, f"dist-{manifest}", f"OURS_{manifest}")
    plugins.arm_declared()
    assert world.load("PKG.core").free(1) == ("ours", ("ours", 8))
    sets = [plugins.patchset(manifest) for manifest in (first, second)]
    assert [item.failure for item in sets] == [None, None]
    for item in reversed(sets):
        item.undo()


def test_sets_that_ask_to_come_after_each_other_are_refused(world: World, name: str) -> None:
    sets = []
    for manifest, other in ((f"a{name}", f"b{name}"), (f"b{name}", f"a{name}")):
        package = world.site / f"{world.ours}_{manifest}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        world.manifest = package / f"{manifest}.yaml"
        world.declare(world.entry(after=[f"{other}/core.free"]), manifest=manifest)
        assert world.pin() == 0
        sets.append(plugins.PatchSet.load(f"{world.ours}_{manifest}", manifest))
    with pytest.raises(PatchError, match="after each other"):
        plugins.in_order(sets)


def test_the_plug_in_of_the_documentation_is_pinned_verified_and_in_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "registry.md").read_text()
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.partition("## For other plug-ins")[2], re.M | re.S)
    assert [kind for kind, _ in found] == ["yaml", "python", "toml", "python"]
    manifest, patches, packaging, _ = (text for _, text in found)
    package = tmp_path / "their_plugin"
    (package / "manifests").mkdir(parents=True)
    for file in ("__init__.py", "manifests/__init__.py"):
        (package / file).touch()
    (package / "patches.py").write_text(patches)
    (package / "manifests" / "theirs.yaml").write_text(manifest)
    folder = tmp_path / "their_plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.0\n")
    entry_points = packaging.partition("\n\n")[0].replace("project.entry-points.", "").replace('"', "")
    (folder / "entry_points.txt").write_text(entry_points)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for verb in ("pin", "verify"):
        done = subprocess.run([sys.executable, "-m", "afdpatch", verb, "--manifest", "theirs"], capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    look = """
from vllm import plugins
plugins.load_general_plugins()
from vllm.v1.core.sched.scheduler import PauseState, Scheduler
scheduler = Scheduler.__new__(Scheduler)
scheduler._pause_state = PauseState.PAUSED_ALL
scheduler.get_num_unfinished_requests()
"""
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd=tmp_path)
    assert "unfinished: 0" in done.stdout, done.stdout + done.stderr
