"""SARIF 2.1.0: each finding is a result at the manifest's line, with the place in the package as a related location.

Only the part of the standard that a finding needs, as plain dataclasses; `None` and empty lists are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

from afdpatch.registry.links import pinned_link
from afdpatch.registry.marks import Marks
from afdpatch.registry.report import Finding, Report, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MANIFEST_ROOT = "MANIFESTROOT"
PACKAGE_ROOT = "PACKAGEROOT"


@dataclass(frozen=True)
class _Message:
    text: str
    markdown: str | None = None


@dataclass(frozen=True)
class _Artifact:
    uri: str
    uri_base_id: str | None = None


@dataclass(frozen=True)
class _Region:
    start_line: int


@dataclass(frozen=True)
class _Physical:
    artifact_location: _Artifact
    region: _Region | None = None


@dataclass(frozen=True)
class _Logical:
    fully_qualified_name: str


@dataclass(frozen=True)
class _Location:
    physical_location: _Physical
    id: int | None = None
    logical_locations: list[_Logical] = field(default_factory=list)
    message: _Message | None = None


@dataclass(frozen=True)
class _Configuration:
    level: str


@dataclass(frozen=True)
class _Rule:
    id: str
    name: str
    short_description: _Message
    default_configuration: _Configuration
    properties: dict[str, Any]


@dataclass(frozen=True)
class _Result:
    rule_id: str
    rule_index: int
    level: str
    message: _Message
    locations: list[_Location]
    related_locations: list[_Location]
    partial_fingerprints: dict[str, str]
    properties: dict[str, Any]


def report_sarif(report: Report, marks: Marks) -> str:
    """The log's text."""
    verdicts = [verdict for verdict in Verdict if verdict is not Verdict.OK]
    rules = [
        _Rule(
            id=verdict.value,
            name="".join(part.title() for part in verdict.value.split("-")),
            short_description=_Message(verdict.meaning),
            default_configuration=_Configuration("error"),
            properties={"exitCode": verdict.exit_code},
        )
        for verdict in verdicts
    ]
    driver: dict[str, Any] = {"name": "afdpatch", "rules": rules}
    if own := _own_version():
        driver["version"] = own
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "exitCode": report.verdict.exit_code}],
        "originalUriBaseIds": {
            MANIFEST_ROOT: {"description": {"text": "The root of the repository that holds the manifest."}},
            PACKAGE_ROOT: _package_root(report),
        },
        "results": [_result(report, marks, entry_id, finding, verdicts) for entry_id, finding in report.all_findings()],
        "properties": {
            "package": report.lock.manifest.package,
            "pinned": f"{report.lock.manifest.version} {report.lock.manifest.commit}",
            "found": str(report.identity),
            "digest": report.lock.digest,
            "verdict": report.verdict.value,
        },
    }
    return json.dumps(_plain({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}), indent=2) + "\n"


def _result(
    report: Report, marks: Marks, entry_id: str | None, finding: Finding, verdicts: Sequence[Verdict]
) -> _Result:
    subject = ": ".join(part for part in (entry_id, finding.symbol, finding.message) if part)
    text = f"{subject}. Expected: {finding.expected}. Found: {finding.found}. To do: {finding.todo}."
    link = pinned_link(report.lock, finding.symbol) if finding.symbol else None
    logical = [_Logical(finding.symbol)] if finding.symbol else []
    related = []
    if finding.file:
        related.append(
            _Location(
                id=1,
                physical_location=_Physical(
                    _Artifact(finding.file, PACKAGE_ROOT), _Region(finding.line) if finding.line else None
                ),
                logical_locations=logical,
                message=_Message(f"{report.lock.manifest.package}, {report.identity}"),
            )
        )
        text += " See [its source](1)."
    identity = "\n".join((entry_id or "", finding.symbol or "", finding.verdict.value, finding.message))
    return _Result(
        rule_id=finding.verdict.value,
        rule_index=verdicts.index(finding.verdict),
        level="error",
        message=_Message(text),
        locations=[
            _Location(
                physical_location=_Physical(_Artifact(marks.name, MANIFEST_ROOT), _Region(marks.of(entry_id, finding))),
                logical_locations=[_Logical(entry_id)] if entry_id else [],
            )
        ],
        related_locations=related,
        partial_fingerprints={
            "afdpatchFinding/v1": hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()
        },
        properties={key: value for key, value in (("pinnedAt", link), ("entry", entry_id)) if value},
    )


def _package_root(report: Report) -> dict[str, Any]:
    described = {"description": {"text": f"The folder that holds {report.lock.manifest.package}: {report.source}"}}
    path = PurePath(report.source)
    return {"uri": path.as_uri() + "/", **described} if path.is_absolute() else described


def _own_version() -> str | None:
    try:
        return version("afdpatch")
    except PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries with SARIF's camelCase names."""
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {_camel(name): _plain(part) for name, part in pairs if part is not None and part != []}
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
