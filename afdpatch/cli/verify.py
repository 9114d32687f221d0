"""`afdpatch verify`: compares what the patches were pinned to with a vLLM, without importing it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from afdpatch.cli.pin import source_tree
from afdpatch.registry import (
    Finding,
    Lock,
    Manifest,
    PatchError,
    Report,
    Verdict,
    identify,
    lock_path,
    packaged_manifest,
    verify,
)

DESCRIPTION = """\
Compares every patch's target, the symbols that it relies on, and the release itself with what was pinned. Comments and
docstrings do not count. Nothing of the package is imported, except with --probe, and then in another process.
"""

EXIT_CODES = """\
exit codes, the first that applies (a run without findings ends with 0):
  2  usage, or the manifest is not valid
  8  another release, or another commit, than the pinned one
  3  a target, a relied-on symbol or a holder is absent
  5  the manifest was edited after the lock was made, or the lock cannot be read
  4  a target or a relied-on symbol has drifted (its body or its interface)
  6  --probe: the reason for a patch is gone
  1  --probe: a remove_when function could not be evaluated
"""

STYLES = {Verdict.OK: "green", Verdict.OBSOLETE: "yellow"}


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="hold the patches against the installed vLLM",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print (default: text)")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="a source root that holds the package's folder, or that folder itself (default: the installed package)",
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="the manifest (default: afdpatch's own)")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also ask each patch's remove_when, in a process of its own, which may import the package",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if args.probe and args.source is not None:
        print("afdpatch verify: --probe asks the installed package; it doesn't go with --source", file=sys.stderr)
        return 2
    try:
        path = args.manifest or packaged_manifest("afdpatch.manifests", "afd")
        manifest = Manifest.read(path)
        lock = Lock.read(lock_path(path, manifest.version))
        tree = source_tree(manifest.package, args.source)
        identity = identify(tree, manifest.distributions if args.source is None else ())
        probes = None
        if args.probe:
            from afdpatch.registry.probe import run_probes

            probes = run_probes(lock.manifest.entries)
        report = verify(lock, tree, identity, manifest=manifest, probes=probes)
    except PatchError as error:
        print(f"afdpatch verify: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"afdpatch verify: {error}", file=sys.stderr)
        return 2
    if args.format == "json":
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print_text(report)
    return report.verdict.exit_code


def print_text(report: Report) -> None:
    """Prints a report as a table and, below it, what differs. Colours on a terminal only."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    manifest = report.lock.manifest
    established = {"reported": "as reported", "file-hashes": "by file hashes", "none": "not established"}
    console.print(f"{manifest.package} in {report.source}: {report.identity}", markup=False)
    console.print(f"pinned: {manifest.version}, commit {manifest.commit}", markup=False)
    console.print(f"commit {established[report.commit_by]}: {report.commit_detail}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("id", "seam", "symbol", "at", "verdict"):
        table.add_column(title, overflow="fold")
    for entry in report.entries:
        verdict = Text(entry.verdict.value, style=STYLES.get(entry.verdict, "red"))
        place = f"{entry.file.rpartition('/')[2]}:{entry.line}"
        table.add_row(entry.entry.id, entry.entry.seam, Text(entry.entry.target), place, verdict)
    console.print()
    console.print(table)
    for finding in report.findings:
        _print_finding(console, None, finding)
    for entry in report.entries:
        for finding in entry.findings:
            _print_finding(console, entry.entry.id, finding)
    failed = sum(entry.verdict is not Verdict.OK for entry in report.entries)
    console.print()
    console.print(
        Text.assemble(
            (report.verdict.value, STYLES.get(report.verdict, "bold red")),
            f": {len(report.entries)} entries, {failed} with findings; manifest {report.lock.digest[:12]}",
        )
    )


def _print_finding(console: Any, patch_id: str | None, finding: Finding) -> None:
    from rich.text import Text

    title = " ".join(part for part in (patch_id, finding.symbol) if part)
    console.print()
    console.print(
        Text.assemble(
            (finding.verdict.value, "bold red"), f" {title}: {finding.message}" if title else f" {finding.message}"
        )
    )
    for label, value in (
        ("at", finding.place),
        ("expected", finding.expected),
        ("found", finding.found),
        ("to do", finding.todo),
    ):
        if value:
            console.print(f"  {label:<9} {value}", markup=False)
