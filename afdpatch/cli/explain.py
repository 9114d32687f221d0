"""`afdpatch explain ID`: everything that is known of one patch."""

from __future__ import annotations

import argparse
import json
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from afdpatch.cli._registry import Opened, add_options, guarded, opened
from afdpatch.cli.pin import add_schema
from afdpatch.registry.explain import Explanation, Reference, explain

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """\
Tells of one patch why it is there, what it changes and what it stands on in the vLLM at hand, which function of ours
does it, who uses it, and when it can go. Nothing of vLLM is imported.
"""

EPILOG = """\
examples:
  afdpatch explain model.own-weights
  afdpatch explain compat.rotary --format json | jq .remove_when
  afdpatch list                                            the ids

exit codes:
  0  explained, whatever the verdict (afdpatch verify ends with it)
  2  usage, there is no such patch, or the manifest is not valid
  5  the lock cannot be read, or doesn't have the patch yet
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="why a patch is there, where, and when it can go",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", metavar="ID", help="the patch (afdpatch list shows them)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print (default: text)")
    add_options(parser)
    add_schema(parser, "explain")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return guarded("explain", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    case = opened(args)
    try:
        found = explain(case.report, args.id, case.tree, case.marks)
    except KeyError:
        known = [entry.id for entry in case.manifest.entries]
        if args.id in known:
            print(f"afdpatch explain: {args.id} is not in the lock yet; run `afdpatch pin`", file=sys.stderr)
            return 5
        near = get_close_matches(args.id, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"afdpatch explain: there is no patch {args.id!r}{hint} (afdpatch list shows all)", file=sys.stderr)
        return 2
    if args.format == "json":
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found, case)
    return 0


def _print(found: Explanation, case: Opened) -> None:
    from rich.text import Text

    from afdpatch.registry.reports.text import console, verdict_text

    out = console(width=120)
    entry, manifest = found.report.entry, case.report.lock.manifest
    out.print(Text.assemble((entry.id, "bold"), "  ", verdict_text(found.report.verdict)))
    out.print()
    _wrapped(out, entry.why)
    out.print()
    always = "always, from the import on" if entry.when == "always" else "once the role is known"
    rows: list[tuple[str, str | None]] = [
        ("kind", f"{entry.kind}, {entry.path} path"),
        ("in effect", always),
        ("roles", ", ".join(entry.roles) or "all"),
        ("processes", ", ".join(entry.processes) or "all"),
        ("after", ", ".join(entry.after)),
        ("conflicts", ", ".join(entry.conflicts)),
        ("since", entry.since),
        ("declared", found.declared),
    ]
    _rows(out, rows)
    out.print(f"\nin {manifest.package} {case.report.identity} ({case.report.source})", markup=False, style="bold")
    _reference(out, "target", found.target)
    for item in found.relies:
        _reference(out, "relies on", item)
    for item in found.holders:
        _reference(out, "holder", item)
    for title, code in (("replacement", found.replacement), ("goes when", found.removal)):
        if code is not None:
            out.print()
            out.print(Text.assemble((f"{title:<12}", "bold"), code.name))
            out.print(f"{'':<12}{code.place}", markup=False, style="dim")
            for line in (code.doc or "").splitlines():
                out.print(f"{'':<12}{line}".rstrip(), markup=False)
    if found.removal is None:
        out.print()
        out.print(
            Text.assemble((f"{'goes when':<12}", "bold"), "no condition is declared: it stays until it is removed")
        )
    for finding in found.report.findings:
        out.print()
        out.print(Text.assemble(verdict_text(finding.verdict), f" {finding.symbol or ''}: {finding.message}"))
        _rows(out, [("expected", finding.expected), ("found", finding.found), ("to do", finding.todo)])


def _rows(out: Console, rows: list[tuple[str, str | None]]) -> None:
    for label, value in rows:
        if value:
            out.print(f"{label:<12}{value}", markup=False)


def _wrapped(out: Console, text: str) -> None:
    out.print(text, markup=False, soft_wrap=False, width=min(out.width, 100))


def _reference(out: Console, label: str, item: Reference) -> None:
    from rich.text import Text

    from afdpatch.registry.reports.text import verdict_text

    out.print(Text.assemble(f"{label:<12}", item.name, "  ", verdict_text(item.verdict)))
    out.print(f"{'':<12}{item.place}", markup=False, style="dim")
    if item.link:
        out.print(f"{'':<12}{item.link}", markup=False, style="dim")
