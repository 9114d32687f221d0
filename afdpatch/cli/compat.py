"""`afdpatch compat`: how each patch stands in each of several releases, as a matrix."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afdpatch.cli.pin import SOURCE_HELP, add_manifest, add_schema, source_tree
from afdpatch.cli.progress import markdown_table, progress
from afdpatch.registry import Lock, Manifest, OtherVersion, PatchError, identify, lock_path
from afdpatch.registry.compat import Column, Standing, TreeView, examine
from afdpatch.registry.plugins import manifest_file
from afdpatch.registry.releases import Release, records, release_path, version_key

FORMAT = 1

DESCRIPTION = f"""\
Compares what every patch stands on with one release or several, and prints a matrix of patches and releases. Nothing of
the package is imported, except with --probe. The version plays no part: `afdpatch verify` refuses other releases, this
tells what would become of the patches there.

SRC: {SOURCE_HELP};
`installed`; or a version that has a lock or a record. Left out: all of those.
"""

EPILOG = """\
same       as it was pinned
obsolete   the same, but the patch's remove_when is true (only with --probe, only for the installed package)
body       what the target or a relied-on symbol does has changed
interface  its signature, decorators or bases changed, or a module holds the target that didn't
moved      it is elsewhere: an import leads there, or its body is there
gone       it isn't there

exit codes: the worst of all: 0 same, 6 obsolete, 4 body or interface, 3 moved or gone; 2 usage; 5 no fresh lock
"""

STYLES = {Standing.SAME: "green", Standing.OBSOLETE: "yellow", Standing.BODY: "yellow", Standing.INTERFACE: "magenta"}


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compat",
        help="how the patches stand in other vLLM releases",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="*", metavar="SRC", help="a release")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    add_manifest(parser)
    parser.add_argument("--probe", action="store_true", help="also ask each remove_when, for the installed package")
    add_schema(parser, "compat")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    try:
        path = manifest_file(args.manifest)
        lock = fresh_lock(path)
        known = [record.stem for record in records(path)]
        sources = args.sources or sorted({*known, lock.manifest.version}, key=version_key)
        if args.probe and "installed" not in sources:
            print("afdpatch compat: --probe asks the installed package; name it: `installed`", file=sys.stderr)
            return 2
        columns = []
        with progress("afdpatch compat", len(sources)) as step:
            for number, source in enumerate(sources):
                step(number, source)
                columns.append(column(lock, path, source, probe=args.probe))
    except PatchError as error:
        print(f"afdpatch compat: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"afdpatch compat: {error}", file=sys.stderr)
        return 2
    worst = Standing.worst(item.standing for item in columns)
    if args.format == "json":
        manifest = lock.manifest
        head = {"format": FORMAT, "manifest": manifest.name, "digest": lock.digest, "pinned": manifest.version}
        verdict = {"standing": worst.value, "exit_code": worst.exit_code}
        print(json.dumps(head | verdict | {"releases": [item.as_dict() for item in columns]}, indent=2))
    elif args.format == "markdown":
        print(as_markdown(lock, columns))
    else:
        print_text(lock, columns)
    return worst.exit_code


def fresh_lock(path: Path) -> Lock:
    """The lock of a manifest's file.

    Raises:
        StaleLock: the manifest was edited since.
        PatchError: either cannot be read.
    """
    from afdpatch.registry import StaleLock
    from afdpatch.registry.lock import manifest_digest

    manifest = Manifest.read(path)
    lock = Lock.read(lock_path(path, manifest.version))
    if manifest_digest(manifest) != lock.digest:
        raise StaleLock(f"{path} was edited after its lock was made", todo="run `afdpatch pin`")
    return lock


def column(lock: Lock, path: Path, source: str, *, probe: bool = False) -> Column:
    """One release's column.

    Raises:
        OSError: there is no such source.
        PatchError: its record is of no use.
    """
    manifest = lock.manifest
    release = None
    if source == manifest.version:
        release = Release.of_lock(lock)
    elif release_path(path, source).is_file() and not Path(source).exists():
        release = Release.read(release_path(path, source))
        if release.package != manifest.package:
            raise OtherVersion(f"the record {source} is of {release.package}", expected=manifest.package)
    if release is not None:
        return Column(release.version, release.version, release.commit, examine(lock, release))
    installed = source == "installed" and not Path(source).exists()
    tree = source_tree(manifest.package, None if installed else source)
    identity = identify(tree, manifest.distributions if installed else ())
    probes = None
    if installed and probe:
        from afdpatch.cli._registry import COMPILE_PROBE
        from afdpatch.registry.probe import run_probes

        probes = run_probes(manifest.entries, COMPILE_PROBE)
        failed = {name: text for name, text in probes.items() if isinstance(text, str)}
        for name, text in failed.items():
            raise PatchError("its remove_when could not be evaluated", patch_id=name, found=text)
    label = identity.version or (identity.commit or tree.label)[:12]
    return Column(label, identity.version, identity.commit, examine(lock, TreeView(tree), probes))


def details(columns: Sequence[Column]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What isn't the same: for each patch and each thing it stands on, the releases and what is there."""
    table: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for item in columns:
        for cell in item.cells:
            for part in cell.parts:
                if part.standing is not Standing.SAME:
                    table.setdefault((cell.entry_id, part.symbol), []).append((item.label, part.text))
    order = [cell.entry_id for cell in columns[0].cells] if columns else []
    rows = sorted(table.items(), key=lambda row: order.index(row[0][0]))
    return [(entry_id, symbol, found) for (entry_id, symbol), found in rows]


def as_markdown(lock: Lock, columns: Sequence[Column]) -> str:
    """The matrix and its details as Markdown."""
    manifest = lock.manifest
    rows = [
        [f"`{entry.id}`", *(item.cells[index].standing.value for item in columns)]
        for index, entry in enumerate(manifest.entries)
    ]
    lines = [markdown_table([f"patch (pinned to {manifest.version})", *(item.label for item in columns)], rows), ""]
    for entry_id, symbol, found in details(columns):
        lines.append(f"- `{entry_id}`: `{symbol}`")
        lines += [f"  - {label}: {text}" for label, text in found]
    return "\n".join(lines).rstrip()


def print_text(lock: Lock, columns: Sequence[Column]) -> None:
    """Prints the matrix as a table and, below it, what isn't the same. Colours on a terminal only."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    manifest = lock.manifest
    console.print(
        f"{manifest.package}, patches pinned to {manifest.version}, manifest {lock.digest[:12]}", markup=False
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("patch")
    for item in columns:
        table.add_column(Text(item.label))
    for index, entry in enumerate(manifest.entries):
        standings = [item.cells[index].standing for item in columns]
        table.add_row(entry.id, *(Text(one.value, style=STYLES.get(one, "red")) for one in standings))
    console.print()
    console.print(table)
    for entry_id, symbol, found in details(columns):
        console.print()
        console.print(Text.assemble((entry_id, "bold"), f" {symbol}"))
        for label, text in found:
            console.print(f"  {label:<9} {text}", markup=False)
