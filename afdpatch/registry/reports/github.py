"""Annotations of GitHub's workflow runs: one command a finding, at the manifest's line."""

from __future__ import annotations

from afdpatch.registry.marks import Marks
from afdpatch.registry.report import Finding, Report


def report_github(report: Report, marks: Marks) -> str:
    """`::error file=…,line=…,title=…::…` for each finding, and a plain line at the end that says how it ended."""
    lines = [_command(report, marks, entry_id, finding) for entry_id, finding in report.all_findings()]
    return "\n".join([*lines, report.summary]) + "\n"


def _command(report: Report, marks: Marks, entry_id: str | None, finding: Finding) -> str:
    title = f"{entry_id or report.lock.manifest.name}: {finding.verdict.value}"
    properties = {"file": marks.name, "line": str(marks.of(entry_id, finding)), "title": title}
    written = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    message = f"{finding.symbol}: {finding.message}" if finding.symbol else finding.message
    parts = [message, f"expected: {finding.expected}", f"found: {finding.found}", f"to do: {finding.todo}"]
    if finding.place:
        parts.insert(1, f"at: {finding.place}")
    return f"::error {written}::{_data(chr(10).join(parts))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
