from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from afdpatch.registry import SourceTree, Verdict
from tests.registry.conftest import COMMIT, World


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.declare(
        world.entry(relies=["PKG.core:helper", "PKG.core:LIMIT"], holders=["PKG.user"]),
        world.entry("PKG.core:Engine.run", relies=["PKG.core:Engine.make"]),
        world.entry("PKG.core:Engine", id="core.engine", kind="official", when="always"),
    )
    assert world.pin() == 0
    return world


def outcome(world: World, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    code = world.verify("--format", "json", *options)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return report


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {entry["id"]: entry["verdict"] for entry in report["entries"]}


def test_an_unchanged_source_is_ok(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 0
    assert set(verdicts(report).values()) == {"ok"}
    assert report["commit"]["established_by"] == "file-hashes"
    assert pinned.package not in sys.modules


def test_comments_and_docstrings_do_not_count(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("# a comment", "# other words\n\n    # and more")
    pinned.core('"""A method."""', '"""Says\n\n        more."""')
    pinned.core('"""A class."""\n', "")
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 0
    assert report["commit"]["established_by"] == "none"
    assert report["commit"]["changed_files"] == [f"{pinned.package}/core.py"]


@pytest.mark.parametrize(
    ("old", "new", "patch", "symbol", "part"),
    [
        ("* scale\n", "* scale + 1\n", "core.free", "core:free", "body"),
        ("scale=2)", "scale=3)", "core.free", "core:free", "interface"),
        ("x + LIMIT", "x - LIMIT", "core.free", "core:helper", "body"),
        ("LIMIT = 3", "LIMIT = 4", "core.free", "core:LIMIT", "body"),
        ("@staticmethod", "@classmethod", "core.engine-run", "core:Engine.make", "interface"),
    ],
)
def test_a_change_is_drift(
    pinned: World, capsys: pytest.CaptureFixture[str], old: str, new: str, patch: str, symbol: str, part: str
) -> None:
    pinned.core(old, new)
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 4
    entry = next(entry for entry in report["entries"] if entry["id"] == patch)
    finding = next(item for item in entry["findings"] if item["symbol"] == f"{pinned.package}.{symbol}")
    assert finding["verdict"] == "drifted"
    assert finding["message"].startswith(f"the {part} of")
    assert finding["file"] == f"{pinned.package}/core.py" and finding["line"] > 0
    assert finding["expected"] != finding["found"]
    assert "afdpatch pin" in finding["todo"]


def test_the_other_entries_are_still_ok(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("* scale\n", "* scale + 1\n")
    assert verdicts(outcome(pinned, capsys)) == {"core.free": "drifted", "core.engine-run": "ok", "core.engine": "ok"}


def test_a_target_that_is_gone_is_absent(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("def free", "def freed")
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 3
    assert verdicts(report)["core.free"] == "absent"


def test_a_relied_on_symbol_that_is_gone_is_absent(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("LIMIT = 3", "OTHER = 3")
    assert outcome(pinned, capsys)["exit_code"] == 3


def test_a_target_that_moved_is_absent_with_its_new_place(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    path = pinned.site / pinned.package / "core.py"
    path.rename(path.with_name("new.py"))
    pinned.write(f"{pinned.package}/core.py", "from .new import *\nfrom .new import free")
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 3
    assert f"write {pinned.package}.new:free" in report["entries"][0]["findings"][0]["todo"]


def test_a_holder_that_let_go_has_drifted_and_a_lost_one_is_absent(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    user = pinned.write(f"{pinned.package}/user.py", "from .core import helper\n")
    assert outcome(pinned, capsys)["exit_code"] == 4
    user.unlink()
    assert outcome(pinned, capsys)["exit_code"] == 3


@pytest.mark.parametrize("version", ["1.1", "dev", "1.0.dev3+gabc", "1.0.post1", "not a version"])
def test_another_version_is_told_before_everything_else(
    pinned: World, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    pinned.core("def free", "def freed")
    pinned.distribution(version)
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 8
    assert verdicts(report)["core.free"] == "absent"


def test_a_local_part_is_the_same_version(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.distribution("1.0+cpu")
    assert outcome(pinned, capsys)["exit_code"] == 0


def test_the_other_distribution_s_name_is_known_too(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = pinned.site / f"{pinned.package}-0.dist-info"
    other = pinned.site / f"{pinned.package.replace('-', '_')}_other-0.dist-info"
    metadata.rename(other)
    text = (other / "METADATA").read_text().replace(f"Name: {pinned.package}", f"Name: {pinned.package}-other")
    (other / "METADATA").write_text(text)
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 0
    assert {"version": "1.0", "by": f"{pinned.package}-other"} in report["version"]["reported"]


def test_a_version_file_that_disagrees_with_the_distribution_is_another_version(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned.write(f"{pinned.package}/_version.py", "__version__ = '1.1'\n")
    assert outcome(pinned, capsys)["exit_code"] == 8


@pytest.mark.parametrize(
    ("reported", "code", "by"),
    [(COMMIT, 0, "reported"), ("g" + COMMIT[:9], 0, "reported"), ("gfedcba987", 8, "none"), ("g01", 8, "none")],
)
def test_a_reported_commit_is_compared(
    pinned: World, capsys: pytest.CaptureFixture[str], reported: str, code: int, by: str
) -> None:
    pinned.write(f"{pinned.package}/_version.py", f"__version__ = '1.0'\n__commit_id__ = {reported!r}\n")
    report = outcome(pinned, capsys)
    assert (report["exit_code"], report["commit"]["established_by"]) == (code, by)


def test_a_checkout_without_a_version_is_known_by_its_files(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    (pinned.site / pinned.package / "_version.py").unlink()
    source = ("--source", str(pinned.site))
    assert outcome(pinned, capsys, *source)["exit_code"] == 0
    pinned.core("# a comment", "# other words")
    assert outcome(pinned, capsys, *source)["exit_code"] == 8


def test_a_source_folder_is_verified_instead_of_the_installed_package(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned.distribution("9.9")
    for folder in (pinned.site, pinned.site / pinned.package):
        assert outcome(pinned, capsys, "--source", str(folder))["exit_code"] == 0
    assert outcome(pinned, capsys)["exit_code"] == 8


def test_an_edited_manifest_makes_the_lock_stale(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    text = pinned.manifest.read_text(encoding="utf-8")
    pinned.manifest.write_text(text.replace("why: A test.", "why: Another reason.", 1), encoding="utf-8")
    report = outcome(pinned, capsys)
    assert report["exit_code"] == 5
    assert report["findings"][0]["verdict"] == "stale-lock"
    assert "core.free" in report["findings"][0]["found"]
    pinned.core("* scale\n", "* scale + 1\n")
    assert outcome(pinned, capsys)["exit_code"] == 5, "a stale lock goes before drift"
    pinned.core("def free", "def freed")
    assert outcome(pinned, capsys)["exit_code"] == 3, "and an absent target before a stale lock"


def test_a_lock_edited_by_hand_or_of_no_use_is_refused(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    lock = pinned.manifest.parent / "locks" / "1.0.json"
    good = lock.read_text(encoding="utf-8")
    for bad, says in (
        (good.replace("A test.", "No test."), "edited by hand"),
        ("{}", "not a lock"),
        ("", "not a lock"),
    ):
        lock.write_text(bad, encoding="utf-8")
        assert pinned.verify() == 5
        assert says in capsys.readouterr().err
    lock.unlink()
    assert pinned.verify() == 5
    assert "afdpatch pin" in capsys.readouterr().err


def test_usage_errors_end_with_two(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert pinned.verify("--source", str(pinned.site / "none")) == 2
    assert pinned.verify("--source", str(pinned.site), "--probe") == 2
    with pytest.raises(SystemExit) as caught:
        pinned.verify("--format", "xml")
    assert caught.value.code == 2
    pinned.manifest.write_text("a: [", encoding="utf-8")
    assert pinned.verify() == 2


def test_a_text_report_names_patch_symbol_place_and_what_to_do(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned.core("* scale\n", "* scale + 1\n")
    capsys.readouterr()
    assert pinned.verify() == 4
    text = capsys.readouterr().out
    line = SourceTree.at(pinned.package, pinned.site).resolve(f"{pinned.package}.core:free").line
    for part in (
        f"{pinned.package}.core:free",
        "core.free",
        f"core.py:{line}",
        "expected",
        "found",
        "afdpatch pin",
        COMMIT,
    ):
        assert part in text, part
    assert "\x1b" not in text, "no colours unless on a terminal"


@pytest.mark.parametrize(
    ("answer", "code", "verdict"), [("True", 6, "obsolete"), ("False", 0, "ok"), ("1/0", 1, "probe-failed")]
)
def test_a_probe_is_asked_in_another_process(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    verdict: str,
) -> None:
    source = f"print('noise')\ndef gone():\n    import {world.package}.core\n    return {answer}\n"
    world.write(f"{world.ours}/probes.py", source)
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    world.patchset(world.entry(remove_when="OURS.probes:gone"))
    assert outcome(world, capsys)["exit_code"] == 0
    report = outcome(world, capsys, "--probe")
    assert (report["exit_code"], report["entries"][0]["verdict"]) == (code, verdict)
    assert f"{world.package}.core" not in sys.modules


def test_a_probe_sees_the_package_unpatched(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = "from afdpatch.registry import PatchSet\npatches = PatchSet.load('OURS')\npatches.arm()\n"
    world.write(f"{world.ours}/__init__.py", init)
    world.write(f"{world.ours}/probes.py", "def gone():\n    from PKG.core import free\n    return free(1) != 8\n")
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    world.patchset(world.entry(remove_when="OURS.probes:gone", when="always"))
    check = f"import {world.ours}, {world.package}.core as core; assert core.free(1) == ('ours', 8)"
    subprocess.run([sys.executable, "-c", check], check=True)
    assert outcome(world, capsys, "--probe")["exit_code"] == 0


def test_pin_is_reproducible_and_ends_with_a_newline(pinned: World) -> None:
    lock = pinned.manifest.parent / "locks" / "1.0.json"
    first = lock.read_bytes()
    assert pinned.pin("--source", str(pinned.site)) == 0
    assert lock.read_bytes() == first
    assert first.endswith(b"}\n")
    data = json.loads(first)
    assert data["commit"] == COMMIT and data["version"] == "1.0"
    assert json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n" == first.decode()
    assert set(data["files"]) == {f"{pinned.package}/core.py", f"{pinned.package}/user.py"}


@pytest.mark.parametrize(
    ("entry", "code", "says"),
    [
        ({"target": "PKG.core:none"}, 3, "has no 'none'"),
        ({"relies": ["PKG.core:Engine.none"]}, 3, "neither has nor visibly inherits"),
        ({"target": "PKG.none:free"}, 3, "there is no module"),
        ({"holders": ["PKG._version"]}, 3, "the holder doesn't hold the target"),
        ({"target": "PKG.user:free"}, 2, "write PKG.core:free"),
        ({"target": "PKG.core:Engine"}, 2, "patches functions and methods only"),
        ({"target": "PKG.core:LIMIT"}, 2, "patches functions and methods only"),
    ],
)
def test_pin_refuses_what_it_cannot_pin(
    world: World, capsys: pytest.CaptureFixture[str], entry: dict[str, Any], code: int, says: str
) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.declare(world.entry() | entry)
    assert world.pin() == code
    error = capsys.readouterr().err
    assert world.text(says) in error and "core.free" in error
    assert not (world.manifest.parent / "locks").exists()


def test_pin_refuses_another_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.declare(world.entry())
    world.distribution("1.1")
    assert world.pin() == 8
    assert world.pin("--source", str(world.site)) == 0
    world.write(f"{world.package}/_version.py", "__version__ = '1.0'\n__commit_id__ = 'gfedcba987'\n")
    assert world.pin("--source", str(world.site)) == 8


def test_the_gravest_verdict_counts() -> None:
    order = [verdict.exit_code for verdict in Verdict]
    assert order == [8, 3, 5, 2, 7, 4, 6, 1, 0]
    assert Verdict.gravest([Verdict.OBSOLETE, Verdict.OK, Verdict.ABSENT, Verdict.DRIFTED]) is Verdict.ABSENT
    assert Verdict.gravest([]) is Verdict.OK


@pytest.mark.parametrize("key", ["replacement", "remove_when", "probe"])
def test_a_function_of_ours_that_is_not_there_is_found_before_anything_is_applied(
    world: World, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    world.declare(world.entry(**{key: "OURS.patches:nosuch"}))
    assert world.pin() == 0
    report = outcome(world, capsys)
    assert report["exit_code"] == 2
    (finding,) = report["entries"][0]["findings"]
    assert finding["message"] == f"its {key} is absent"
    assert finding["found"].endswith("patches.py has no nosuch")


@pytest.mark.parametrize(
    "source",
    ["from elsewhere import *", "from elsewhere import nosuch", "def __getattr__(name): ...", "nosuch = 3",
     "for name in ('nosuch',):\n    globals()[name] = print", "if True:\n    class nosuch: ..."],
)  # fmt: skip
def test_what_a_module_may_have_is_not_said_to_be_absent(
    world: World, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    world.write("OURS/patches.py".replace("OURS", world.ours), source)
    world.declare(
        world.entry(replacement="OURS.patches:nosuch"), world.entry("PKG.core:Engine.run", replacement="x.y:z")
    )
    assert world.pin() == 0
    assert outcome(world, capsys)["exit_code"] == 0
