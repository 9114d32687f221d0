"""Sources of every kind give the same verdicts: directory, wheel, sdist, git; and with nothing heavy installed."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import afdpatch.registry
from afdpatch.registry.files import SourceError
from afdpatch.registry.source import SourceTree
from tests.registry.conftest import World

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def directory(world: World, version: str = "1.0") -> str:
    return str(world.site)


def wheel(world: World, version: str = "1.0") -> str:
    path = world.site.parent / f"{world.package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((world.site / world.package).rglob("*.py")):
            archive.write(file, file.relative_to(world.site).as_posix())
        metadata = f"Metadata-Version: 2.1\nName: {world.package}\nVersion: {version}\n\nVersion: 9.9 in the text\n"
        archive.writestr(f"{world.package}-{version}.dist-info/METADATA", metadata)
    return str(path)


def sdist(world: World, version: str = "1.0") -> str:
    path = world.site.parent / f"{world.package}-{version}.tar.gz"
    top = f"{world.package}-{version}"
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted((world.site / world.package).rglob("*.py")):
            archive.add(file, f"{top}/src/{file.relative_to(world.site).as_posix()}")
            if file.name == "__init__.py":  # Another folder of that name, farther from the top.
                archive.add(file, f"{top}/src/tests/copy/{file.relative_to(world.site).as_posix()}")
        data = f"Metadata-Version: 2.1\nName: {world.package}\nVersion: {version}\n".encode()
        info = tarfile.TarInfo(f"{top}/PKG-INFO")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return str(path)


def repository(world: World, version: str = "1.0") -> str:
    """A bare repository with two commits; the second is another release's. There is nothing to check out."""
    if not (world.site / ".git").exists():
        git(world.site, "init", "--quiet", "--initial-branch=main")
    git(world.site, "add", world.package)
    git(world.site, "commit", "--quiet", "--allow-empty", "-m", "a")
    return f"git:{world.site}@HEAD"


KINDS = [directory, wheel, sdist, repository]


def declare(world: World, commit: str | None = None) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    header = {} if commit is None else {"commit": commit}
    world.declare(
        world.entry(relies=["PKG.core:helper"], holders=["PKG.user"]), world.entry("PKG.core:Engine.run"), **header
    )


def verdicts(world: World, capsys: pytest.CaptureFixture[str], source: str) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    code = world.verify("--format", "json", "--source", source)
    report = json.loads(capsys.readouterr().out)
    return code, {entry["id"]: entry["verdict"] for entry in report["entries"]}


@pytest.mark.parametrize("make", KINDS)
def test_a_source_of_any_kind_is_pinned_and_verified_alike(
    world: World, capsys: pytest.CaptureFixture[str], make: Callable[..., str]
) -> None:
    declare(world)
    if make is repository:  # What git names is the commit, and the manifest's must be that.
        repository(world)
        declare(world, git(world.site, "rev-parse", "HEAD"))
    assert world.pin() == 0
    lock = world.manifest.parent / "locks" / "1.0.json"
    first = lock.read_bytes()
    source = f"git:{world.site}@HEAD" if make is repository else make(world)
    assert world.pin("--source", source) == 0
    assert lock.read_bytes() == first
    assert verdicts(world, capsys, source) == (0, {"core.free": "ok", "core.engine-run": "ok"})

    world.core("* scale\n", "* scale + 1\n")
    world.core("def run", "def ran")
    here = verdicts(world, capsys, directory(world))[1]
    assert here == {"core.free": "drifted", "core.engine-run": "absent"}
    code, found = verdicts(world, capsys, make(world))
    assert found == here
    assert code == (8 if make is repository else 3)


def test_git_reads_the_revision_and_not_the_working_tree(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    declare(world)
    repository(world)
    declare(world, git(world.site, "rev-parse", "HEAD"))
    assert world.pin() == 0
    world.core("* scale\n", "* scale + 1\n")
    repository(world)
    (world.site / world.package / "core.py").write_text("broken(")
    bare = world.site.parent / "bare@odd.git"
    git(world.site, "clone", "--quiet", "--bare", ".", str(bare))
    assert verdicts(world, capsys, f"git:{bare}@main~1")[0] == 0
    assert verdicts(world, capsys, f"git:{bare}@main") == (8, {"core.free": "drifted", "core.engine-run": "ok"})


def test_a_caller_s_git_doesn_t_lead_to_another_repository(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    declare(world)
    source = repository(world)
    git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert f"{world.package}/core.py" in SourceTree.open(world.package, source).files.python_files()


def test_a_commit_that_git_names_establishes_the_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    declare(world)
    (world.site / world.package / "_version.py").unlink()
    source = repository(world)
    declare(world, git(world.site, "rev-parse", "HEAD"))
    assert world.pin("--source", source) == 0
    capsys.readouterr()
    assert world.verify("--format", "json", "--source", source) == 0
    commit = json.loads(capsys.readouterr().out)["commit"]
    assert (commit["established_by"], "git reports" in commit["detail"]) == ("reported", True)
    git(world.site, "commit", "--quiet", "--allow-empty", "-m", "another")
    assert world.verify("--source", f"git:{world.site}@HEAD") == 8


@pytest.mark.parametrize("make", [wheel, sdist])
def test_the_metadata_of_an_archive_must_agree_with_its_version_file(world: World, make: Callable[..., str]) -> None:
    declare(world)
    assert world.pin() == 0
    assert world.verify("--source", make(world, "1.0+local")) == 0
    assert world.verify("--source", make(world, "1.1")) == 8


def test_a_damaged_or_foreign_source_ends_with_two_and_its_name(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    declare(world)
    assert world.pin() == 0
    path = Path(wheel(world))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo(f"{world.package}/core.py").header_offset
    data[offset + 100] ^= 0xFF
    (tmp_path / "damaged.whl").write_bytes(data)
    (tmp_path / "cut.tar.gz").write_bytes(Path(sdist(world)).read_bytes()[:-100])
    (tmp_path / "text.whl").write_text("no wheel")
    with zipfile.ZipFile(tmp_path / "foreign.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    (tmp_path / "plain").mkdir()
    repository(world)
    for source in ("damaged.whl", "cut.tar.gz", "text.whl", "foreign.whl", "none.whl", "plain"):
        capsys.readouterr()
        assert world.verify("--source", str(tmp_path / source)) == 2, source
        assert source in capsys.readouterr().err
    for source in (f"git:{tmp_path / 'plain'}@HEAD", f"git:{world.site}@nowhere", f"git:{world.site}@--help"):
        assert world.verify("--source", source) == 2, source


def linked(world: World) -> list[str]:
    """A package with links of every kind; gives the files that Python could import."""
    site, package = world.site, world.site / world.package
    world.write("shared.py", "x = 1\n")
    world.write("elsewhere/deep/user.py", "from PKG.core import free\n")
    (package / "linked.py").symlink_to("../shared.py")
    (package / "again.py").symlink_to("linked.py")
    (package / "folder").symlink_to("../elsewhere")
    (site / "elsewhere" / "back").symlink_to(f"../{world.package}")
    (package / "loop.py").symlink_to("loop.py")
    (package / "gone.py").symlink_to("nowhere.py")
    (package / "itself").symlink_to(".")
    (package / "up").symlink_to("..")
    (package / "folder.py").mkdir()
    os.link(package / "core.py", package / "hard.py")
    names = ("__init__", "_version", "again", "core", "folder/deep/user", "hard", "linked")
    return [f"{world.package}/{name}.py" for name in names]


def sdist_with_links(world: World) -> str:
    path = world.site.parent / "links.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("elsewhere", world.package, "shared.py"):
            archive.add(world.site / name, f"top/{name}")
    return str(path)


def repository_with_links(world: World) -> str:
    git(world.site, "init", "--quiet", "--initial-branch=main")
    git(world.site, "add", "elsewhere", "shared.py")
    return repository(world)


@pytest.mark.parametrize("make", [directory, sdist_with_links, repository_with_links])
def test_links_are_followed_and_those_that_lead_back_are_not(world: World, make: Callable[..., str]) -> None:
    declare(world)
    (world.site / world.package / "user.py").unlink()
    expected = linked(world)
    tree = SourceTree.open(world.package, make(world))
    assert tree.files.python_files() == expected
    assert [file for file, _ in tree.contents] == expected
    assert tree.files.read(f"{world.package}/again.py") == b"x = 1\n"
    assert tree.files.read(f"{world.package}/loop.py") is None


def test_what_a_linked_folder_holds_is_verified(world: World) -> None:
    world.declare(world.entry())
    assert world.pin() == 0
    linked(world)
    assert world.verify() == 7


def test_a_pipe_is_no_source(world: World) -> None:
    """Whoever opened it would wait without end."""
    world.write(f"{world.package}/user.py", "from .pipe import *\nfrom .core import free\n")
    world.declare(world.entry(holders=["PKG.user"]))
    os.mkfifo(world.site / world.package / "pipe.py")
    assert (world.pin(), world.verify()) == (0, 0)


def test_a_wheel_may_keep_its_modules_as_data(world: World) -> None:
    declare(world)
    assert world.pin() == 0
    plain = Path(wheel(world))
    moved = plain.with_name(f"{world.package}-1.0-1-py3-none-any.whl")
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(moved, "w") as new:
        for name in old.namelist():
            place = {"core.py": "x.data/platlib/", "user.py": "x.data/purelib/"}.get(Path(name).name, "")
            new.writestr(place + name, old.read(name))
    tree = SourceTree.open(world.package, str(moved))
    assert tree.contents == SourceTree.open(world.package, str(plain)).contents
    assert world.verify("--source", str(moved)) == 0


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_that_is_damaged_anywhere_ends_with_two(world: World, method: int) -> None:
    path = world.site.parent / "damaged.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in sorted((world.site / world.package).rglob("*.py")):
            archive.write(file, file.relative_to(world.site).as_posix())
        archive.writestr("x.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
    damaged(world, path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_an_sdist_that_is_damaged_anywhere_ends_with_two(world: World, mode: str) -> None:
    path = world.site.parent / "damaged.tar.gz"
    with tarfile.open(path, mode) as archive:
        archive.add(world.site / world.package, f"top/{world.package}")
    damaged(world, path)


def damaged(world: World, path: Path) -> None:
    """Reads an archive with some bytes changed, many times: it is read, or refused as what it is."""
    whole = path.read_bytes()
    rng = random.Random(7)
    refused = 0
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            assert SourceTree.open(world.package, str(path)).contents
        except SourceError as error:
            refused += 1
            assert path.name in str(error)
    assert refused


def test_a_file_name_that_is_no_utf8_is_searched_and_shown(world: World) -> None:
    world.declare(world.entry())
    assert world.pin() == 0
    with open(os.fsencode(world.site / world.package) + b"/caf\xe9.py", "wb") as stream:
        stream.write(b"from .core import *\n")
    source, output = ["--source", str(world.site)], ["--output", str(world.site / "report")]
    formats = [["verify", "--format", form] for form in ("text", "json", "junit", "sarif", "github")]
    for command in (*formats, ["verify", *output], ["pin"], ["verify", "--format", "text"]):
        arguments = [*command, "--manifest", str(world.manifest), *source]
        env = os.environ | {"PYTHONPATH": f"{world.site}{os.pathsep}{ROOT}", "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run([sys.executable, "-m", "afdpatch", *arguments], capture_output=True, env=env)
        assert b"Traceback" not in done.stderr, done.stderr[-600:]
        assert done.returncode == (0 if command == ["pin"] else 7), arguments


def test_a_wheel_s_files_are_those_of_its_folder(world: World) -> None:
    declare(world)
    trees = [SourceTree.open(world.package, make(world)) for make in KINDS]
    names = trees[0].files.python_files()
    assert f"{world.package}/core.py" in names
    for tree in trees[1:]:
        assert tree.files.python_files() == names
        assert dict(tree.contents) == dict(trees[0].contents)
        assert tree.files.read(f"{world.package}/none.py") is None
    with pytest.raises(SourceError):
        SourceTree.open(world.package, "git:")


def test_verify_needs_neither_the_package_nor_torch_but_four_libraries(world: World, tmp_path: Path) -> None:
    declare(world)
    assert world.pin() == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("yaml", "rich", "pygments", "markdown_it", "mdurl", "wrapt", "importlib_metadata", "zipp"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            (bare / name).symlink_to(Path(spec.origin).parent)
    ours = Path(afdpatch.registry.__file__).parents[1]
    (bare / "afdpatch").mkdir()
    for item in (*ours.iterdir(), ROOT / "manifests", ROOT / "patches", ROOT / "kernels"):
        if item.name != "__pycache__":
            (bare / "afdpatch" / item.name).symlink_to(item)
    program = """
import sys
from importlib.util import find_spec
assert not [name for name in ("vllm", "torch", "numpy", "packaging") if find_spec(name)], sys.path
from afdpatch.cli import main
sys.exit(main(sys.argv[1:]))
"""
    env = {"PYTHONPATH": str(bare), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    manifest = ("--manifest", str(world.manifest))
    for arguments in (
        ("verify", *manifest, "--source", wheel(world)),
        ("verify", *manifest, "--source", sdist(world), "--format", "json"),
        ("pin", *manifest, "--source", str(world.site), "--output", str(tmp_path / "lock.json")),
        ("compat", *manifest, str(world.site), "1.0"),
    ):
        command = [sys.executable, "-S", "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr + done.stdout
