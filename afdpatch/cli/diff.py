"""`afdpatch diff`: what changed under a patch, between the pinned source and another, and what that means for ours."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from afdpatch.cli.compat import STYLES, fresh_lock
from afdpatch.cli.pin import SOURCE_HELP, add_manifest, add_schema, add_source, source_tree
from afdpatch.registry import PatchError
from afdpatch.registry.drift import Drift, SymbolDrift, three_way
from afdpatch.registry.plugins import manifest_file

FORMAT = 1

DESCRIPTION = """\
Compares the pinned source of everything that a patch stands on, the same in another source, and our replacement: the
differences as a diff, and the names of the change that our replacement uses too. Nothing of the package is imported.

The pinned source is the installed package, or what --base names; it is refused if it isn't what was pinned.
"""

EXIT_CODES = """\
exit codes:
  0  nothing changed                    4  a body or an interface changed
  2  usage; no such patch               5  no fresh lock
  3  something moved or is gone         8  --base (or the installed package) isn't what was pinned
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diff",
        help="what changed under a patch",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", metavar="ID", help="the patch's id in the manifest")
    add_source(parser)
    parser.add_argument(
        "--base", metavar="SRC", help=f"the pinned source: {SOURCE_HELP} (default: the installed package)"
    )
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    add_manifest(parser)
    add_schema(parser, "diff")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    try:
        path = manifest_file(args.manifest)
        lock = fresh_lock(path)
        entry = next((entry for entry in lock.manifest.entries if entry.id == args.id), None)
        if entry is None:
            known = ", ".join(entry.id for entry in lock.manifest.entries)
            print(f"afdpatch diff: no patch {args.id!r}; there are: {known}", file=sys.stderr)
            return 2
        package = lock.manifest.package
        base = source_tree(package, args.base, "--base")
        drift = three_way(entry, lock, base, source_tree(package, args.source))
    except PatchError as error:
        print(f"afdpatch diff: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"afdpatch diff: {error}", file=sys.stderr)
        return 2
    if args.format == "json":
        head = {"format": FORMAT, "manifest": lock.manifest.name, "pinned": lock.manifest.version}
        print(json.dumps(head | {"exit_code": drift.standing.exit_code} | drift.as_dict(), indent=2))
    elif args.format == "markdown":
        print(as_markdown(drift))
    else:
        print_text(drift)
    return drift.standing.exit_code


def conclusion(drift: Drift) -> str:
    """What the drift means for our replacement, in a sentence."""
    if drift.standing.exit_code == 0:
        return "Nothing changed."
    if drift.ours is None:
        return "Nothing of ours is installed here; whatever builds on it must be read against the change."
    if all(symbol.standing.exit_code == 0 for symbol in drift.symbols):
        return "What the patch stands on is the same; who holds, keeps or overrides the target isn't."
    if drift.touched:
        return "The change touches what our replacement relies on."
    return "The change touches no name that our replacement uses; it may still change what they mean."


def meaning(symbol: SymbolDrift) -> list[str]:
    """What a symbol's change touches of ours, a line each."""
    lines = []
    if not symbol.diff and symbol.standing.exit_code == 4:
        lines.append("a condition that it stands under, or a class on the way to it: these lines are the same")
    if symbol.parameters:
        lines.append(
            f"parameters: were ({symbol.parameters[0]}), are ({symbol.parameters[1]}); ours must have the same"
        )
    for touch in symbol.touches:
        upstream, ours = "/".join(touch.upstream), "/".join(touch.ours)
        lines.append(f"{touch.name}: {upstream} in the change, {ours} in ours (line {touch.line})")
    return lines


def as_markdown(drift: Drift) -> str:
    """The drift as Markdown."""
    lines = [f"## `{drift.entry.id}`: {drift.standing.value}", "", conclusion(drift)]
    for symbol in drift.symbols:
        if symbol.standing.exit_code == 0:
            continue
        lines += ["", f"### `{symbol.symbol}`: {symbol.standing.value}", "", symbol.detail, ""]
        lines += [f"- {line}" for line in meaning(symbol)]
        lines += ["", "```diff", *symbol.diff, "```"]
    if drift.others:
        lines += ["", *(f"- `{part.symbol}`: {part.text}" for part in drift.others)]
    if drift.ours and drift.standing.exit_code:
        lines += ["", f"### Ours: `{drift.entry.replacement}` ({drift.ours})", "", "```python", drift.ours_text, "```"]
    return "\n".join(lines)


def print_text(drift: Drift) -> None:
    """Prints the drift. Colours on a terminal only."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for symbol in drift.symbols:
        style = STYLES.get(symbol.standing, "red")
        console.print(Text.assemble((f"{symbol.standing.value:<9}", style), f" {symbol.symbol}"))
    for symbol in drift.symbols:
        if symbol.standing.exit_code == 0:
            continue
        console.print()
        console.print(Text.assemble((symbol.symbol, "bold"), f": {symbol.detail}"))
        for line in symbol.diff:
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
            console.print(Text(line, style=colour))
        for line in meaning(symbol):
            console.print(Text(f"  touches {line}", style="bold yellow"))
    if drift.others:
        console.print()
    for part in drift.others:
        console.print(Text.assemble((part.symbol, "bold"), f": {part.text}"))
    if drift.ours and drift.standing.exit_code:
        console.print()
        console.print(Text.assemble("ours: ", (drift.entry.replacement or "", "bold"), f" ({drift.ours})"))
        console.print(Text(drift.ours_text))
    console.print()
    console.print(Text(conclusion(drift), style="bold"))
