"""`afdpatch verify`: compares what the patches were pinned to with a vLLM, without importing it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from afdpatch.cli._registry import add_options, guarded, opened
from afdpatch.cli.pin import add_schema
from afdpatch.registry import Report
from afdpatch.registry.marks import Marks
from afdpatch.registry.reports import FORMATS, render

DESCRIPTION = """\
Compares every patch's target, the symbols that it relies on, and the release itself with what was pinned. Comments and
docstrings do not count. Nothing of the package is imported, except with --probe, and then in another process.
"""

EPILOG = """\
examples:
  afdpatch verify                                          a table, and what differs
  afdpatch verify --format json | jq .verdict              for programs; --schema prints its JSON Schema
  afdpatch verify --format junit --output verify.xml       for test reports
  afdpatch verify --format sarif --output verify.sarif     for code scanning
  afdpatch verify --format github                          annotations in a GitHub workflow

exit codes, the first that applies (a run without findings ends with 0):
  2  usage, or the manifest is not valid
  8  another release, or another commit, than the pinned one
  3  a target, a relied-on symbol or a holder is absent
  5  the manifest was edited after the lock was made, or the lock cannot be read
  2  a target can't be patched soundly, as its source shows
  7  the original is kept by others: a default argument, a table, a subclass, an import that is not among the holders
  4  a target or a relied-on symbol has drifted (its body or its interface)
  6  --probe: the reason for a patch is gone
  1  --probe: a remove_when function could not be evaluated
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="hold the patches against the installed vLLM",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="how to report (default: text)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the report (default: to print it)")
    add_options(parser)
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also ask each patch's remove_when, in a process of its own, which may import the package",
    )
    add_schema(parser, "verify")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if args.probe and args.source is not None:
        print("afdpatch verify: --probe asks the installed package; it doesn't go with --source", file=sys.stderr)
        return 2
    return guarded("verify", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    case = opened(args, probe=args.probe)
    show(case.report, case.marks, args.format, args.output)
    return case.report.verdict.exit_code


def show(report: Report, marks: Marks, form: str, output: Path | None) -> None:
    """Writes a report to a file; or prints it, as text in colours where that goes to a terminal.

    Raises:
        OSError: the file cannot be written.
    """
    if output is not None:
        output.write_text(render(report, marks, form), encoding="utf-8", errors="backslashreplace")
        print(f"{report.summary}; {form} report in {output}", file=sys.stderr)
    elif form == "text":
        from afdpatch.registry.reports.text import console, print_report

        print_report(report, marks, console())
    else:
        sys.stdout.write(render(report, marks, form))
