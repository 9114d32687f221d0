"""The report for people: a table and, below it, what differs. Colours only where the console is a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from afdpatch.registry.marks import Marks
from afdpatch.registry.report import Finding, Report, Verdict

STYLES = {Verdict.OK: "green", Verdict.OBSOLETE: "yellow"}
"""The colours of verdicts; red where there is none."""


def console(width: int = 200) -> Console:
    """A console on standard output; where that is no terminal, without colours, and lines of up to `width` columns."""
    made = Console(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made = Console(highlight=False, soft_wrap=True, no_color=True, width=width)
    return made


def verdict_text(verdict: Verdict) -> Text:
    """A verdict in its colour."""
    return Text(verdict.value, style=STYLES.get(verdict, "bold red"))


def report_text(report: Report, marks: Marks) -> str:
    """The report as plain text."""
    out = io.StringIO()
    print_report(report, marks, Console(file=out, highlight=False, soft_wrap=True, no_color=True, width=200))
    return out.getvalue()


def print_report(report: Report, marks: Marks, console: Console) -> None:
    """Prints the report."""
    manifest = report.lock.manifest
    established = {"reported": "as reported", "file-hashes": "by file hashes", "none": "not established"}
    console.print(f"{manifest.package} in {report.source}: {report.identity}", markup=False)
    console.print(f"pinned: {manifest.version}, commit {manifest.commit}", markup=False)
    console.print(f"commit {established[report.commit_by]}: {report.commit_detail}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("id", "seam", "symbol", "at", "verdict"):
        table.add_column(title, overflow="fold")
    for entry in report.entries:
        place = f"{entry.file.rpartition('/')[2]}:{entry.line}"
        target = Text(entry.entry.target)
        table.add_row(entry.entry.id, entry.entry.seam, target, place, verdict_text(entry.verdict))
    console.print()
    console.print(table)
    for entry_id, finding in report.all_findings():
        _print_finding(console, marks, entry_id, finding)
    console.print()
    verdict, colon, rest = report.summary.partition(":")
    console.print(Text.assemble((verdict, STYLES.get(report.verdict, "bold red")), colon, rest))


def _print_finding(console: Console, marks: Marks, entry_id: str | None, finding: Finding) -> None:
    title = " ".join(part for part in (entry_id, finding.symbol) if part)
    head = f" {title}: {finding.message}" if title else f" {finding.message}"
    console.print()
    console.print(Text.assemble((finding.verdict.value, "bold red"), head))
    for label, value in (
        ("declared", f"{marks.name}:{marks.of(entry_id, finding)}"),
        ("at", finding.place),
        ("expected", finding.expected),
        ("found", finding.found),
        ("to do", finding.todo),
    ):
        if value:
            console.print(f"  {label:<9} {value}", markup=False)
