"""The forms of a verify report: each is read back by what reads it, and points at the right lines."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from junitparser import JUnitXml
from rich.console import Console

from afdpatch.cli.pin import schema_path
from afdpatch.registry import Lock, Manifest, Report, SourceTree, Verdict, identify, lock_path, verify
from afdpatch.registry.links import link_here, permalink, pinned_link
from afdpatch.registry.manifest import KINDS
from afdpatch.registry.marks import Marks
from afdpatch.registry.reports import FORMATS, render
from afdpatch.registry.reports.text import print_report
from tests.registry.conftest import COMMIT, World

FORGE = "https://forge.example/owner/project"


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.declare(
        world.entry(relies=["PKG.core:helper", "PKG.core:LIMIT"], holders=["PKG.user"]),
        world.entry("PKG.core:Engine.run", relies=["PKG.core:Engine.make"]),
        world.entry("PKG.core:Engine", id="core.engine", kind="official", when="always"),
        repository=FORGE,
    )
    assert world.pin() == 0
    return world


def drift(world: World) -> None:
    """One relied-on symbol drifts, one target and one holder go."""
    world.core("LIMIT = 3", "LIMIT = 4")
    world.core("def run(self", "def walk(self")
    (world.site / world.package / "user.py").unlink()


def reported(world: World) -> tuple[Report, Marks]:
    manifest = Manifest.read(world.manifest)
    tree = SourceTree.at(world.package, world.site)
    lock = Lock.read(lock_path(world.manifest, manifest.version))
    return verify(lock, tree, identify(tree), manifest=manifest), Marks.read(world.manifest)


def line_of(world: World, text: str, after: str = "patches:") -> int:
    """The manifest's first line that holds a text, below a line that holds another."""
    lines = world.manifest.read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if after in line)
    return next(index + 1 for index, line in enumerate(lines) if index >= start and world.text(text) in line)


def expected_lines(world: World) -> dict[tuple[str, str], int]:
    """For each finding after `drift`, the line where the symbol is written."""
    return {
        ("core.free", world.text("PKG.core:LIMIT")): line_of(world, "PKG.core:LIMIT"),
        ("core.free", world.text("PKG.user")): line_of(world, "PKG.user"),
        ("core.engine-run", world.text("PKG.core:Engine.run")): line_of(world, "PKG.core:Engine.run"),
    }


# ---- JSON ------------------------------------------------------------------------------------------------------------


def closed(schema: Any) -> Any:
    """The schema with no room for keys that it doesn't name."""
    if isinstance(schema, dict):
        made = {key: closed(value) for key, value in schema.items()}
        return {**made, "additionalProperties": False} if "properties" in made else made
    return [closed(item) for item in schema] if isinstance(schema, list) else schema


def test_every_report_fits_the_published_schema_and_has_no_key_beside_it(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(schema_path("verify").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(closed(schema))
    seen = set()
    for change in (
        lambda: None,
        lambda: pinned.core("LIMIT = 3", "LIMIT = 4"),
        lambda: pinned.core("def run(self", "def walk(self"),
        lambda: edit_why(pinned),
        lambda: pinned.distribution("2.0"),
    ):
        change()
        capsys.readouterr()
        code = pinned.verify("--format", "json")
        report = json.loads(capsys.readouterr().out)
        validator.validate(report)
        assert report["exit_code"] == code
        seen.add(report["verdict"])
    assert seen == {"ok", "drifted", "absent", "other-version"}
    assert "stale-lock" in [finding["verdict"] for finding in report["findings"]]


def edit_why(world: World) -> None:
    text = world.manifest.read_text(encoding="utf-8")
    world.manifest.write_text(text.replace("why: A test.", "why: Another.", 1), encoding="utf-8")


def test_the_schema_names_what_the_code_has() -> None:
    schema = json.loads(schema_path("verify").read_text(encoding="utf-8"))
    assert schema["$defs"]["verdict"]["enum"] == [verdict.value for verdict in Verdict]
    assert schema["properties"]["exit_code"]["enum"] == sorted({verdict.exit_code for verdict in Verdict})
    assert schema["properties"]["entries"]["items"]["properties"]["kind"]["enum"] == list(KINDS)
    assert all(verdict.meaning.endswith(".") for verdict in Verdict)


def test_a_report_that_lacks_a_key_does_not_fit(pinned: World) -> None:
    drift(pinned)
    report, marks = reported(pinned)
    schema = json.loads(schema_path("verify").read_text(encoding="utf-8"))
    data = json.loads(render(report, marks, "json"))
    jsonschema.validate(data, schema)
    del data["entries"][0]["findings"][0]["symbol"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_schema_prints_the_schema(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        world.verify("--schema")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["$schema"].startswith("https://json-schema.org/")


# ---- the manifest's lines --------------------------------------------------------------------------------------------


def test_marks_are_the_lines_of_keys_symbols_and_entries(pinned: World) -> None:
    marks = Marks.read(pinned.manifest)
    assert marks.line(None, "version") == line_of(pinned, "version:", after="manifest:")
    assert marks.line("core.free") == line_of(pinned, "id: core.free")
    assert marks.line("core.free", "why") == line_of(pinned, "why:", after="id: core.free")
    assert marks.line("core.engine") == line_of(pinned, "id: core.engine\n".strip(), after="make") > 1
    for (entry_id, symbol), line in expected_lines(pinned).items():
        assert marks.line(entry_id, symbol) == line
    assert marks.line("core.free", "no such") == marks.line("core.free")
    assert marks.line("no such") == line_of(pinned, "patches:")


def test_the_manifest_is_named_from_its_repository_s_root(pinned: World) -> None:
    assert Marks.read(pinned.manifest).name == pinned.manifest.resolve().as_posix()
    (pinned.site / ".git").mkdir()
    assert Marks.read(pinned.manifest).name == f"{pinned.ours}/afd.yaml"


# ---- GitHub ----------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"::error ([^:]*)::(.*)")


def unescape(text: str, *, in_property: bool = False) -> str:
    """As the runner does it."""
    for code, char in (("%0D", "\r"), ("%0A", "\n"), *((("%3A", ":"), ("%2C", ",")) if in_property else ())):
        text = text.replace(code, char)
    return text.replace("%25", "%")


def annotations(text: str) -> list[tuple[dict[str, str], str]]:
    """What the runner reads: each annotation's properties and message."""
    read = []
    for match in COMMAND.finditer(text):
        pairs = (item.split("=", 1) for item in match.group(1).split(","))
        read.append(({key: unescape(value, in_property=True) for key, value in pairs}, unescape(match.group(2))))
    return read


def test_an_annotation_points_at_the_line_where_the_symbol_is_declared(pinned: World) -> None:
    drift(pinned)
    (pinned.site / ".git").mkdir()
    report, marks = reported(pinned)
    text = render(report, marks, "github")
    read = annotations(text)
    assert len(read) == len(list(report.all_findings()))
    found = {}
    for properties, message in read:
        assert properties["file"] == f"{pinned.ours}/afd.yaml"
        entry_id, _, verdict = properties["title"].partition(": ")
        assert verdict in [item.value for item in Verdict]
        found[(entry_id, message.partition(": ")[0])] = int(properties["line"])
    entries = {key: line for key, line in found.items() if key in expected_lines(pinned)}
    assert entries == expected_lines(pinned)
    assert text.endswith(report.summary + "\n")


def test_what_concerns_the_whole_set_points_at_the_header(pinned: World) -> None:
    edit_why(pinned)
    (pinned.site / pinned.package / "_version.py").write_text("__version__ = '2.0'\n")
    report, marks = reported(pinned)
    lines = {
        properties["title"]: int(properties["line"]) for properties, _ in annotations(render(report, marks, "github"))
    }
    assert lines == {
        "afd: other-version": line_of(pinned, "version:", after="manifest:"),
        "afd: stale-lock": line_of(pinned, "patches:"),
    }


def test_an_annotation_survives_percent_signs_and_lines(pinned: World) -> None:
    pinned.core("LIMIT = 3", "LIMIT = 4")
    report, marks = reported(pinned)
    finding = report.entries[0].findings[0]
    entry = report.entries[0].__class__(
        report.entries[0].entry, "f", 1, (finding.__class__(**{**vars(finding), "found": "50%0A,\r\n::error::x"}),)
    )
    other = report.__class__(**{**vars(report), "entries": (entry,), "findings": ()})
    ((_, message),) = annotations(render(other, marks, "github"))
    assert "found: 50%0A,\r\n::error::x\n" in message
    assert render(other, marks, "github").count("\n") == 2, "one line an annotation, one for the end"


# ---- JUnit -----------------------------------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_entry_and_counts_the_failures(pinned: World, tmp_path: Path) -> None:
    drift(pinned)
    report, marks = reported(pinned)
    text = render(report, marks, "junit")
    read = JUnitXml.fromstring(text.encode("utf-8"))
    (suite,) = list(read)
    cases = {case.name: case for case in suite}
    assert set(cases) == {"release and lock", "core.free", "core.engine-run", "core.engine"}
    failed = {name for name, case in cases.items() if case.result}
    assert failed == {entry.entry.id for entry in report.entries if entry.findings} | (
        {"release and lock"} if report.findings else set()
    )
    root = ElementTree.fromstring(text)
    assert int(root.get("failures") or 0) == int(root[0].get("failures") or 0) == len(failed)
    assert int(root.get("tests") or 0) == 4
    (case,) = root.findall(".//testcase[@name='core.engine-run']")
    assert case.get("classname") == "afd.core"
    assert int(case.get("line") or 0) == line_of(pinned, "PKG.core:Engine.run")
    (failure,) = case.findall("failure")
    both = root.findall(".//testcase[@name='core.free']/failure")
    assert [item.get("type") for item in both] == ["absent"], "one failure a case, of the gravest kind"
    assert all(name in (both[0].text or "") for name in (pinned.text("PKG.core:LIMIT"), pinned.text("PKG.user")))
    assert failure.get("type") == "absent"
    assert f"declared: {marks.name}:{case.get('line')}" in (failure.text or "")


def test_junit_s_failure_is_of_the_gravest_kind_whatever_comes_last(pinned: World) -> None:
    pinned.core("def helper", "def other")
    pinned.core("LIMIT = 3", "LIMIT = 4")
    report, marks = reported(pinned)
    assert [finding.verdict for finding in report.entries[0].findings] == [Verdict.ABSENT, Verdict.DRIFTED]
    (failure,) = ElementTree.fromstring(render(report, marks, "junit")).findall(".//*[@name='core.free']/failure")
    assert failure.get("type") == "absent" and (failure.get("message") or "").endswith(" (and 1 more)")


def test_junit_is_well_formed_whatever_a_version_holds(pinned: World) -> None:
    (pinned.site / pinned.package / "_version.py").write_text("__version__ = '2\\x00\\x1b<&\\udc80'\n")
    report, marks = reported(pinned)
    assert ElementTree.fromstring(render(report, marks, "junit")).get("failures") == "1"


# ---- SARIF -----------------------------------------------------------------------------------------------------------


def sarif(world: World) -> dict[str, Any]:
    report, marks = reported(world)
    (run,) = json.loads(render(report, marks, "sarif"))["runs"]
    assert isinstance(run, dict)
    return run


def test_sarif_points_at_the_manifest_and_at_the_package(pinned: World) -> None:
    drift(pinned)
    run = sarif(pinned)
    rules = run["tool"]["driver"]["rules"]
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": reported(pinned)[0].verdict.exit_code}]
    places, related_lines = {}, []
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == "error"
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
        symbol = result["message"]["text"].split(": ")[1]
        places[(result["properties"].get("entry"), symbol)] = physical["region"]["startLine"]
        for related in result.get("relatedLocations", []):
            upstream = related["physicalLocation"]
            root = run["originalUriBaseIds"][upstream["artifactLocation"]["uriBaseId"]]["uri"]
            assert root == pinned.site.resolve().as_uri() + "/"
            assert upstream["artifactLocation"]["uri"] == f"{pinned.package}/core.py"
            if symbol.endswith(":LIMIT"):
                lines = (pinned.site / pinned.package / "core.py").read_text().splitlines()
                assert lines[upstream["region"]["startLine"] - 1] == "LIMIT = 4"
                related_lines.append(upstream["region"]["startLine"])
            assert f"]({related['id']})" in result["message"]["text"]
    assert {key: line for key, line in places.items() if key in expected_lines(pinned)} == expected_lines(pinned)
    assert len(related_lines) == 1
    (absent,) = [item for item in run["results"] if item["properties"].get("entry") == "core.engine-run"]
    pinned_at = reported(pinned)[0].lock.symbols[pinned.text("PKG.core:Engine.run")]
    assert absent["properties"]["pinnedAt"] == f"{FORGE}/blob/{COMMIT}/{pinned_at.file}#L{pinned_at.line}"


def test_sarif_of_an_unchanged_source_has_no_results(pinned: World) -> None:
    run = sarif(pinned)
    assert run["results"] == []
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {item.value for item in Verdict} - {"ok"}


def test_a_finding_keeps_its_fingerprint_when_lines_move(pinned: World) -> None:
    drift(pinned)
    before = sarif(pinned)["results"]
    text = pinned.manifest.read_text(encoding="utf-8")
    pinned.manifest.write_text("# one more line\n" + text, encoding="utf-8")
    pinned.core('"""The module', '"""\n\nThe module')
    after = sarif(pinned)["results"]
    assert [item["partialFingerprints"] for item in before] == [item["partialFingerprints"] for item in after]
    assert len({json.dumps(item["partialFingerprints"]) for item in after}) == len(after)
    for one, two in zip(before, after, strict=True):
        lines = [item["locations"][0]["physicalLocation"]["region"]["startLine"] for item in (one, two)]
        assert lines[1] == lines[0] + 1


# ---- text, and what all have in common -------------------------------------------------------------------------------


def test_text_has_colours_on_a_terminal_only(pinned: World) -> None:
    drift(pinned)
    report, marks = reported(pinned)
    assert "\x1b" not in render(report, marks, "text")
    out = io.StringIO()
    print_report(report, marks, Console(file=out, force_terminal=True, color_system="standard", width=200))
    assert "\x1b[" in out.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_output_writes_the_report_to_a_file_with_the_same_exit_code(
    pinned: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    drift(pinned)
    capsys.readouterr()
    code = pinned.verify("--format", form)
    printed = capsys.readouterr().out
    output = tmp_path / "report"
    assert pinned.verify("--format", form, "--output", str(output)) == code == 3
    assert capsys.readouterr().out == ""
    assert output.read_text(encoding="utf-8") == printed
    assert pinned.verify("--format", form, "--output", str(tmp_path / "no" / "folder")) == 2


def test_an_unknown_form_is_an_error(pinned: World) -> None:
    with pytest.raises(ValueError, match="no form 'pdf'"):
        render(*reported(pinned), "pdf")


# ---- links -----------------------------------------------------------------------------------------------------------


def test_a_link_has_a_line_only_where_it_is_the_commit_s(pinned: World) -> None:
    report, _ = reported(pinned)
    lock, core = report.lock, f"{pinned.package}/core.py"
    tree = SourceTree.at(pinned.package, pinned.site)
    base = f"{FORGE}/blob/{COMMIT}/{core}"
    assert link_here(lock, tree, core, 7, same_release=True) == f"{base}#L7"
    pinned.core("# a comment", "# a comment\n    # another")
    other = SourceTree.at(pinned.package, pinned.site)
    assert link_here(lock, other, core, 7, same_release=True) == base
    free = lock.symbols[pinned.text("PKG.core:free")]
    assert pinned_link(lock, free.name) == f"{base}#L{free.line}"
    assert pinned_link(lock, "no:such") is None
    unpinned = f"{pinned.package}/__init__.py"
    assert link_here(lock, tree, unpinned, 1, same_release=False) == f"{FORGE}/blob/{COMMIT}/{unpinned}"
    assert link_here(lock, tree, unpinned, 1, same_release=True) == f"{FORGE}/blob/{COMMIT}/{unpinned}#L1"


def test_without_a_repository_there_are_no_links(world: World) -> None:
    world.declare(world.entry())
    assert permalink(Manifest.read(world.manifest), "a.py", 1) is None


@pytest.mark.parametrize("repository", ["http://forge.example/a", "https://forge.example/a/", 'https://f/"x', "x", 3])
def test_a_repository_is_an_https_address(world: World, capsys: pytest.CaptureFixture[str], repository: object) -> None:
    world.declare(world.entry(), repository=repository)
    assert world.pin() == 2
    assert "repository" in capsys.readouterr().err


def test_repository_and_since_are_frozen_where_they_are_given_only(world: World) -> None:
    world.declare(world.entry(since="0.1"), world.entry("PKG.core:Engine.run"), repository=FORGE)
    frozen = Manifest.read(world.manifest).as_dict()
    assert frozen["repository"] == FORGE
    assert [entry.get("since") for entry in frozen["patches"]] == ["0.1", None]
    assert "since" not in frozen["patches"][1]
    world.declare(world.entry())
    assert "repository" not in Manifest.read(world.manifest).as_dict()
