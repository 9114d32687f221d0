"""afdpatch's own manifest against the source of the vLLM that is installed here, if it is the pinned one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afdpatch.cli import pin as pin_command
from afdpatch.cli import verify as verify_command
from afdpatch.registry import (
    Lock,
    Manifest,
    SourceTree,
    Verdict,
    check_entry,
    identify,
    lock_path,
    packaged_manifest,
)
from tests.registry.conftest import command

MANIFEST = packaged_manifest("afdpatch.manifests", "afd")


@pytest.fixture(scope="module")
def lock() -> Lock:
    return Lock.read(lock_path(MANIFEST, Manifest.read(MANIFEST).version))


@pytest.fixture(scope="module")
def installed(lock: Lock) -> SourceTree:
    try:
        tree = SourceTree.installed(lock.manifest.package)
    except FileNotFoundError:
        pytest.skip(f"no {lock.manifest.package} here")
    if identify(tree, lock.manifest.distributions).version != lock.manifest.version:
        pytest.skip(f"another {lock.manifest.package} here")
    return tree


@pytest.fixture
def copy(lock: Lock, installed: SourceTree, tmp_path: Path) -> Path:
    """A tree with the pinned files only."""
    package = lock.manifest.package
    for file in (*lock.files, f"{package}/_version.py", f"{package}/__init__.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.root / file, tmp_path / file)
    return tmp_path


def verify(capsys: pytest.CaptureFixture[str], source: Path) -> dict[str, str]:
    capsys.readouterr()
    code = command(verify_command, "verify", "--format", "json", "--source", str(source))
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return {entry["id"]: entry["verdict"] for entry in report["entries"]} | {"": report["verdict"]}


def edit(copy: Path, file: str, old: str, new: str) -> None:
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_lock_is_what_pin_makes_of_the_manifest(lock: Lock, installed: SourceTree) -> None:
    path = lock_path(MANIFEST, lock.manifest.version)
    assert Lock.make(Manifest.read(MANIFEST), installed, installed=True).to_json() == path.read_text(encoding="utf-8")


def test_pin_from_a_copy_makes_the_same_lock(lock: Lock, copy: Path, tmp_path: Path) -> None:
    output = tmp_path / "lock.json"
    assert command(pin_command, "pin", "--source", str(copy), "--output", str(output)) == 0
    assert output.read_text(encoding="utf-8") == lock.to_json()


def test_a_copy_is_ok_and_comments_do_not_count(capsys: pytest.CaptureFixture[str], lock: Lock, copy: Path) -> None:
    assert set(verify(capsys, copy).values()) == {"ok"}
    for file in lock.files:
        text = (copy / file).read_text(encoding="utf-8")
        (copy / file).write_text(
            "# one more\n" + text.replace("\n    def ", "\n    # comment\n    def "), encoding="utf-8"
        )
    assert set(verify(capsys, copy).values()) == {"ok"}


def test_each_entry_s_own_target_is_what_it_is_told_of(lock: Lock, copy: Path) -> None:
    for entry in lock.manifest.entries:
        symbol = lock.symbols[entry.target]
        text = (copy / symbol.file).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        name = entry.qualname.rpartition(".")[2]
        assert f"def {name}(" in lines[symbol.line - 1]
        lines[symbol.line - 1] = lines[symbol.line - 1].replace(f"def {name}(", f"def {name}_gone(")
        (copy / symbol.file).write_text("".join(lines), encoding="utf-8")
        findings, _ = check_entry(entry, lock, SourceTree.at(lock.manifest.package, copy), trust_hashes=True)
        (copy / symbol.file).write_text(text, encoding="utf-8")
        assert [finding.symbol for finding in findings if finding.verdict is Verdict.ABSENT] == [entry.target]


def test_another_release_is_another_version(capsys: pytest.CaptureFixture[str], lock: Lock, copy: Path) -> None:
    edit(copy, f"{lock.manifest.package}/_version.py", f"'{lock.manifest.version}'", "'99.0'")
    assert verify(capsys, copy)[""] == "other-version"


def test_verify_imports_neither_vllm_nor_torch(installed: SourceTree) -> None:
    program = """
import argparse, sys
from afdpatch.cli import verify
parser = argparse.ArgumentParser()
verify.add_parser(parser.add_subparsers())
code = verify.run(parser.parse_args(["verify"]))
assert not {"vllm", "torch"} & set(sys.modules)
sys.exit(code)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
