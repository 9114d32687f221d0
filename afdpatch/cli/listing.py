"""`afdpatch list`: the entries of a manifest."""

from __future__ import annotations

import argparse
import json
from typing import Any

from afdpatch.cli._registry import add_options, guarded, manifest_path
from afdpatch.cli.pin import add_schema
from afdpatch.registry import Entry, Manifest

DESCRIPTION = """\
Lists the patches that the manifest declares, in the order in which they are applied. vLLM need not be there.
"""

EPILOG = """\
examples:
  afdpatch list
  afdpatch list --role ffn --process worker               what such a process uses
  afdpatch list --format json | jq -r '.entries[].id'

exit codes:
  0  listed
  2  usage, or the manifest is not valid
"""

COLUMNS = ("id", "seam", "target", "kind", "when", "roles", "processes", "path")
FORMAT = 1


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "list",
        help="list the patches",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print (default: text)")
    parser.add_argument("--role", help="only what this role uses (attention, ffn)")
    parser.add_argument("--process", help="only what this kind of process uses (api, engine-core, worker)")
    parser.add_argument("--seam", help="only this seam's")
    add_options(parser, source=False)
    add_schema(parser, "list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return guarded("list", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    manifest = Manifest.read(manifest_path(args))
    entries = [
        entry
        for entry in manifest.entries
        if (args.role is None or entry.when == "always" or args.role in entry.roles)
        and (args.process is None or not entry.processes or args.process in entry.processes)
        and (args.seam is None or entry.seam == args.seam)
    ]
    if args.format == "json":
        listed = [{key: _plain(entry, key) for key in COLUMNS} for entry in entries]
        head = {"format": FORMAT, "manifest": manifest.name, "package": manifest.package, "version": manifest.version}
        print(json.dumps({**head, "entries": listed}, indent=2))
        return 0
    _print(manifest, entries)
    return 0


def _plain(entry: Entry, key: str) -> Any:
    value = getattr(entry, key)
    return list(value) if isinstance(value, tuple) else value


def _print(manifest: Manifest, entries: list[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    from afdpatch.registry.reports.text import console

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in COLUMNS:
        table.add_column(title, overflow="fold")
    for entry in entries:
        cells = []
        for key in COLUMNS:
            value = getattr(entry, key)
            shown = (", ".join(value) or "all") if isinstance(value, tuple) else value
            cells.append(Text(shown, style="bold" if key == "id" else ""))
        table.add_row(*cells)
    out.print(table)
    out.print(
        f"\n{len(entries)} of {len(manifest.entries)} entries of {manifest.name}, for {manifest.package} "
        f"{manifest.version}",
        markup=False,
    )
