"""JUnit XML: each entry is a test case, the release and the lock are one more."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from junitparser import Attr, Failure, JUnitXml, TestCase, TestSuite

from afdpatch.registry.marks import Marks
from afdpatch.registry.report import Finding, Report, Verdict


class _Case(TestCase):
    """A test case with its place in the manifest, as pytest and many readers of JUnit XML have it."""

    file = Attr()
    line = Attr()


def report_junit(report: Report, marks: Marks) -> str:
    """The XML."""
    manifest = report.lock.manifest
    suite = TestSuite(f"afdpatch verify {manifest.name}")
    for name, value in (
        ("package", manifest.package),
        ("pinned", f"{manifest.version} {manifest.commit}"),
        ("found", str(report.identity)),
        ("commit", report.commit_detail),
        ("digest", report.lock.digest),
        ("verdict", report.verdict.value),
        ("exit_code", str(report.verdict.exit_code)),
    ):
        suite.add_property(name, _clean(value))
    cases = [_case(manifest.name, "release and lock", marks, None, report.findings)]
    for entry in report.entries:
        classname = f"{manifest.name}.{entry.entry.seam}"
        cases.append(_case(classname, entry.entry.id, marks, entry.entry.id, entry.findings))
    suite.add_testcases(cases)
    xml = JUnitXml("afdpatch verify")
    xml.add_testsuite(suite)
    xml.update_statistics()  # type: ignore[no-untyped-call]
    out = BytesIO()
    xml.write(out, pretty=True)
    return out.getvalue().decode("utf-8").rstrip("\n") + "\n"


def _case(classname: str, name: str, marks: Marks, entry_id: str | None, findings: Sequence[Finding]) -> TestCase:
    case = _Case(name, classname, time=0.0)
    case.file = marks.name
    case.line = str(marks.of(entry_id, findings[0]) if findings else marks.line(entry_id))
    if findings:
        case.result = _failure(marks, entry_id, findings)
    return case


def _failure(marks: Marks, entry_id: str | None, findings: Sequence[Finding]) -> Failure:
    """All findings of a case: the schema has room for one failure, and readers count cases by it."""
    first = findings[0]
    title = f"{first.symbol}: {first.message}" if first.symbol else first.message
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    failure = Failure(_clean(title + more), Verdict.gravest(finding.verdict for finding in findings).value)
    failure.text = _clean("\n\n".join(_text(marks, entry_id, finding) for finding in findings))
    return failure


def _text(marks: Marks, entry_id: str | None, finding: Finding) -> str:
    head = f"{finding.symbol}: {finding.message}" if finding.symbol else finding.message
    rows = [
        ("declared", f"{marks.name}:{marks.of(entry_id, finding)}"),
        ("at", finding.place),
        ("expected", finding.expected),
        ("found", finding.found),
        ("to do", finding.todo),
    ]
    return "\n".join([head, *(f"  {label + ':':<10}{value}" for label, value in rows if value)])


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return "".join(char for char in text if char in "\t\n" or (ord(char) >= 32 and not 0xD800 <= ord(char) < 0xE000))
