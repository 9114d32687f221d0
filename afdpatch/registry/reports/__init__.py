"""Renderings of what the registry found. Each takes data and gives text; none looks at a source or decides a verdict.

docs/reports.md shows each form and what reads it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afdpatch.registry.marks import Marks
    from afdpatch.registry.report import Report

FORMATS = ("text", "json", "junit", "sarif", "github")


def render(report: Report, marks: Marks, form: str) -> str:
    """A report of `verify` as text, without colours, with a newline at the end.

    Args:
        report: what was found.
        marks: the lines of the manifest that was verified.
        form: one of `FORMATS`.

    Raises:
        ValueError: there is no such form.
    """
    if form == "json":
        return json.dumps(report.as_dict(), indent=2) + "\n"
    if form == "text":
        from afdpatch.registry.reports.text import report_text

        return report_text(report, marks)
    if form == "junit":
        from afdpatch.registry.reports.junit import report_junit

        return report_junit(report, marks)
    if form == "sarif":
        from afdpatch.registry.reports.sarif import report_sarif

        return report_sarif(report, marks)
    if form == "github":
        from afdpatch.registry.reports.github import report_github

        return report_github(report, marks)
    raise ValueError(f"no form {form!r}; one of {', '.join(FORMATS)}")
