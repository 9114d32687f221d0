"""Records of releases, the matrix, and that nothing is served with a record."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli import compat as compat_command
from afdpatch.registry import Lock, Manifest, OtherVersion, PatchSet, lock_path, packaged_manifest
from afdpatch.registry.compat import Standing
from afdpatch.registry.releases import Release, records, version_key
from tests.registry.conftest import World, command
from tests.registry.test_census import LONG
from tests.registry.test_sources import wheel


def compat(world: World, *arguments: str) -> int:
    return command(compat_command, "compat", "--manifest", str(world.manifest), *arguments)


def matrix(world: World, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    capsys.readouterr()
    code = compat(world, "--format", "json", *arguments)
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["exit_code"] == code
    return code, {
        column["release"]: {patch["id"]: patch["standing"] for patch in column["patches"]}
        for column in data["releases"]
    }


def other_release(world: World, version: str) -> str:
    """Gives the package in the site another version, and its source."""
    file = f"{world.package}/_version.py"
    world.write(file, f"__version__ = {version!r}\n__commit_id__ = None\n")
    return str(world.site)


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.write(f"{world.package}/long.py", LONG.replace("NAME", "compute"))
    world.declare(
        world.entry(relies=["PKG.core:LIMIT"], holders=["PKG.user"]),
        world.entry("PKG.core:Engine.run"),
        world.entry("PKG.core:Engine.make"),
        world.entry("PKG.core:Engine.name"),
        world.entry("PKG.long:compute", kind="official"),
    )
    assert world.pin() == 0
    return world


@pytest.mark.parametrize(
    "line",
    ["KEPT = core.Engine.run", "class Mine(core.Engine):\n    def run(self, x):\n        return x"],
)
def test_what_keeps_or_overrides_a_target_in_a_source_is_told(
    pinned: World, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    code, found = matrix(pinned, capsys, other_release(pinned, "9.9"))
    assert code == 0, found
    pinned.write(f"{pinned.package}/new.py", f"from . import core\n{line}\n")
    code, found = matrix(pinned, capsys, str(pinned.site))
    ((_, patches),) = found.items()
    assert code == 4
    assert patches["core.engine-run"] == "interface"
    assert [name for name, standing in patches.items() if standing != "same"] == ["core.engine-run"]


def test_a_target_that_its_class_s_base_makes_a_field_is_no_longer_the_same(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(f"{world.package}/base.py", "class B: ...\n")
    world.write(f"{world.package}/core.py", "from .base import B\nclass Engine(B):\n    SIZE: int = 3\n")
    world.declare(world.entry("PKG.core:Engine.SIZE", kind="replace"))
    assert world.pin() == 0
    assert matrix(world, capsys, str(world.site))[0] == 0
    world.write(f"{world.package}/base.py", "from pydantic import BaseModel as Model\nclass B(Model): ...\n")
    assert world.verify() == 2
    code, found = matrix(world, capsys, str(world.site))
    assert (code, [*found.values()]) == (4, [{"core.engine-size": "interface"}])


def change(world: World) -> None:
    """One patch for each standing."""
    world.core("(2 if twice else 1)", "(3 if twice else 1)")
    world.core("def make(x):", "def make(x, y=0):")
    world.core("def name(", "def named(")
    world.core("return cls.__name__ + suffix", "return suffix")
    (world.site / world.package / "long.py").unlink()
    world.write(f"{world.package}/new.py", LONG.replace("NAME", "compute"))


STANDINGS = {
    "core.free": "same",
    "core.engine-run": "body",
    "core.engine-make": "interface",
    "core.engine-name": "gone",
    "core.compute": "moved",
}


def test_the_matrix_has_every_standing(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.declare()  # Only to see that a stale lock is refused.
    assert compat(pinned, str(pinned.site)) == 5
    _restore(pinned)
    assert matrix(pinned, capsys, str(pinned.site)) == (0, {"1.0": dict.fromkeys(STANDINGS, "same")})
    change(pinned)
    source = other_release(pinned, "1.1")
    code, found = matrix(pinned, capsys, source, "1.0")
    assert (code, found["1.1"]) == (3, STANDINGS)
    assert set(found["1.0"].values()) == {"same"}


def _restore(world: World) -> None:
    lock = Lock.read(lock_path(world.manifest, "1.0"))
    import yaml

    world.manifest.write_text(yaml.safe_dump(lock.manifest.as_dict(), sort_keys=False), encoding="utf-8")


def test_a_record_gives_the_same_column_as_its_source(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    change(pinned)
    source = other_release(pinned, "1.1")
    from_source = matrix(pinned, capsys, source)
    assert pinned.pin("--release", "--source", source) == 0
    record = pinned.manifest.parent / "locks" / "releases" / "1.1.json"
    first = record.read_bytes()
    shutil.rmtree(pinned.site / pinned.package)
    assert matrix(pinned, capsys, "1.1") == from_source
    code, both = matrix(pinned, capsys)
    assert (code, list(both)) == (3, ["1.0", "1.1"])
    assert Release.read(record).to_json().encode() == first


def test_a_release_s_own_wheel_establishes_it(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    other_release(pinned, "1.1")
    path = wheel(pinned, "1.1")
    assert pinned.pin("--release", "--source", path) == 0
    release = Release.read(pinned.manifest.parent / "locks" / "releases" / "1.1.json")
    assert (release.commit, release.established["by"], release.established["archive"]) == (
        None,
        "archive",
        Path(path).name,
    )
    assert release.established["sha256"] == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    pinned.write(f"{pinned.package}/_version.py", "__version__ = '1.1'\n__commit_id__ = 'gabcdef123'\n")
    assert pinned.pin("--release", "--source", str(pinned.site)) == 0
    release = Release.read(pinned.manifest.parent / "locks" / "releases" / "1.1.json")
    assert (release.commit, release.established["by"]) == ("gabcdef123", "reported")


def test_nothing_is_served_with_a_record(pinned: World) -> None:
    """A release that isn't the manifest's is refused with 8, though there is a record of it and nothing differs."""
    other_release(pinned, "1.1")
    pinned.distribution("1.1")
    assert pinned.pin("--release", "--source", str(pinned.site)) == 0
    assert pinned.verify() == 8
    patches = PatchSet.load(pinned.ours, "afd")
    with pytest.raises(OtherVersion) as caught:
        patches.apply(role="red", process="worker")
    assert caught.value.exit_code == 8
    locks = pinned.manifest.parent / "locks"
    shutil.copy(locks / "releases" / "1.1.json", locks / "1.1.json")
    with pytest.raises(OtherVersion, match="record of another release"):
        PatchSet.load(pinned.ours, "afd").apply(role="red", process="worker")


def test_a_record_doesn_t_disturb_the_pinned_release(pinned: World) -> None:
    assert pinned.pin("--release", "--source", str(pinned.site)) == 0
    shutil.copy(
        pinned.manifest.parent / "locks" / "releases" / "1.0.json",
        pinned.manifest.parent / "locks" / "releases" / "0.9.json",
    )
    patches = PatchSet.load(pinned.ours, "afd")
    patches.apply(role="red", process="worker")
    assert pinned.load("PKG.core").free(1) == ("ours", 8)
    patches.undo()


def test_a_record_that_lacks_a_symbol_says_how_to_make_it_again(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pinned.pin("--release", "--source", other_release(pinned, "1.1")) == 0
    other_release(pinned, "1.0")
    pinned.declare(pinned.entry(relies=["PKG.core:helper"]))
    assert pinned.pin("--release", "--source", str(pinned.site)) == 5
    assert pinned.pin() == 0
    capsys.readouterr()
    assert compat(pinned, "1.1") == 5
    assert "pin --release" in capsys.readouterr().err


def test_a_new_holder_is_an_interface_s_change(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.write(f"{pinned.package}/fresh.py", "from .core import free\n")
    assert matrix(pinned, capsys, str(pinned.site))[1]["1.0"]["core.free"] == "interface"
    pinned.write(f"{pinned.package}/fresh.py", "")
    pinned.write(f"{pinned.package}/user.py", "")
    assert matrix(pinned, capsys, str(pinned.site))[1]["1.0"]["core.free"] == "interface"


def test_obsolete_is_told_by_the_probe_and_ends_with_six(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write(f"{world.ours}/probes.py", "def gone(): return True\ndef broken(): return 1/0\n")
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    world.patchset(world.entry(remove_when="OURS.probes:gone"), world.entry("PKG.core:Engine.run"))
    assert matrix(world, capsys, "installed") == (0, {"1.0": {"core.free": "same", "core.engine-run": "same"}})
    code, found = matrix(world, capsys, "installed", "--probe")
    assert (code, found) == (6, {"1.0": {"core.free": "obsolete", "core.engine-run": "same"}})
    assert compat(world, "--probe", "1.0") == 2
    world.patchset(world.entry(remove_when="OURS.probes:broken"))
    assert compat(world, "--probe", "installed") == 1


def test_text_and_markdown_have_the_matrix_and_what_changed(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    change(pinned)
    source = other_release(pinned, "1.1")
    for option in ("text", "markdown"):
        capsys.readouterr()
        assert compat(pinned, "--format", option, source, "1.0") == 3
        out = capsys.readouterr().out
        for part in ("core.engine-run", "1.1", *set(STANDINGS.values()), f"now {pinned.package}.new:compute"):
            assert part in out, (option, part)
        assert "\x1b" not in out
    assert "| `core.engine-run` | body | same |" in out


def test_versions_are_sorted_as_numbers(pinned: World) -> None:
    assert sorted(["0.10.0", "0.9.1", "0.9.0.post1"], key=version_key) == ["0.9.0.post1", "0.9.1", "0.10.0"]
    assert Standing.worst([]) is Standing.SAME
    assert [standing.exit_code for standing in Standing] == [0, 6, 4, 4, 3, 3]


def test_afdpatch_s_own_records_are_complete() -> None:
    path = packaged_manifest("afdpatch.manifests", "afd")
    lock = Lock.read(lock_path(path, Manifest.read(path).version))
    found = [Release.read(record) for record in records(path)]
    assert [release.version for release in found] == ["0.28.0", "0.29.0", "0.31.0", "0.32.0", "0.33.0"]
    for release in found:
        assert release.package == "vllm" and release.manifest_version == lock.manifest.version
        missing = lock.symbols.keys() - release.symbols.keys() - release.absent.keys()
        assert not missing, f"run `afdpatch pin --release` for {release.version}: {sorted(missing)}"
        assert release.held.keys() == lock.holders.keys()
        assert release.established["by"] in ("archive", "reported") and len(release.established["sha256"]) == 64
