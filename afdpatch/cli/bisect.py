"""`afdpatch bisect`: the first commit of a git history that breaks each patch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afdpatch.cli.compat import STYLES, fresh_lock
from afdpatch.cli.pin import add_manifest, add_schema
from afdpatch.cli.progress import markdown_table, progress
from afdpatch.registry import PatchError
from afdpatch.registry.compat import Standing
from afdpatch.registry.gitfiles import GitRepository
from afdpatch.registry.history import Break, Walk
from afdpatch.registry.plugins import manifest_file

FORMAT = 1

DESCRIPTION = """\
Walks once over the first-parent history from GOOD to BAD and finds, for every patch, the first commit after which
something that it stands on isn't as it was pinned. Files that a commit doesn't change cost nothing; nothing is checked
out. Where GOOD is on a branch of its own, as releases are, the walk begins where that branch left.
"""

EPILOG = """\
exit codes: how the patches are at BAD, the worst of all: 0 same, 4 body or interface, 3 moved or gone; 2 usage; 5 no
fresh lock
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bisect",
        help="the first vLLM commit that breaks each patch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("range", metavar="GOOD..BAD", help="the revisions to begin and to end at")
    parser.add_argument("--repo", type=Path, required=True, metavar="DIR", help="a clone of the package's repository")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    add_manifest(parser)
    add_schema(parser, "bisect")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    good, dots, bad = args.range.partition("..")
    if not (good and dots and bad) or bad.startswith("."):
        print(f"afdpatch bisect: {args.range!r} is not GOOD..BAD", file=sys.stderr)
        return 2
    try:
        lock = fresh_lock(manifest_file(args.manifest))
        walk = Walk(lock, GitRepository(args.repo))
        with ExitStack() as stack:
            bars: list[Callable[[int, str], None]] = []

            def step(done: int, total: int, name: str) -> None:
                if not bars:
                    bars.append(stack.enter_context(progress("afdpatch bisect", total)))
                bars[0](done, name)

            walk.run(good, bad, step)
    except PatchError as error:
        print(f"afdpatch bisect: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"afdpatch bisect: {error}", file=sys.stderr)
        return 2
    worst = Standing.worst(item.last for item in walk.breaks)
    if args.format == "json":
        print(json.dumps(as_dict(walk, good, bad, worst), indent=2))
    elif args.format == "markdown":
        print(as_markdown(walk))
    else:
        print_text(walk)
    return worst.exit_code


def as_dict(walk: Walk, good: str, bad: str, worst: Standing) -> dict[str, Any]:
    """The result as plain data."""
    manifest = walk.lock.manifest
    return {
        "format": FORMAT,
        "manifest": manifest.name,
        "digest": walk.lock.digest,
        "good": good,
        "bad": bad,
        "start": vars(walk.start) if walk.start else None,
        "branched_off": walk.left,
        "standing": worst.value,
        "exit_code": worst.exit_code,
        "counts": vars(walk.counts),
        "patches": [item.as_dict() for item in walk.breaks],
    }


def cells(item: Break) -> list[str]:
    """A row: the patch, the commit, its date, its subject, how the patch was after it and how it is at the end."""
    if item.commit is None:
        return [item.entry_id, "", "", "never broken", item.standing.value, item.last.value]
    subject = f"(before the walk) {item.commit.subject}" if item.at_start else item.commit.subject
    return [
        item.entry_id,
        item.commit.name[:12],
        item.commit.date[:10],
        subject,
        item.standing.value,
        item.last.value,
    ]


TITLES = ["patch", "first broken by", "date", "subject", "then", "at the end"]


def summary(walk: Walk) -> str:
    """What the walk took, in a line."""
    counts = walk.counts
    return (
        f"{counts.commits} commits; {counts.looked} look-ups of {len(walk.lock.symbols)} symbols, "
        f"{counts.blobs} files taken up, {counts.searched} searched for holders"
    )


def as_markdown(walk: Walk) -> str:
    """The result as Markdown."""
    lines = [markdown_table(TITLES, [cells(item) for item in walk.breaks]), ""]
    for item in walk.breaks:
        for part in item.parts:
            lines.append(f"- `{item.entry_id}`: `{part.symbol}`: {part.text}")
    return "\n".join([*lines, "", summary(walk)])


def print_text(walk: Walk) -> None:
    """Prints the result. Colours on a terminal only."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    if walk.left and walk.start is not None:
        console.print(f"begins where the good end's branch left: {walk.start.name[:12]}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        table.add_column(title, overflow="fold")
    for item in walk.breaks:
        *head, then, last = cells(item)
        styles = [STYLES.get(standing, "red") for standing in (item.standing, item.last)]
        table.add_row(*map(Text, head), Text(then, style=styles[0]), Text(last, style=styles[1]))
    console.print(table)
    for item in walk.breaks:
        if item.parts:
            console.print()
            console.print(Text.assemble((item.entry_id, "bold"), f" {item.commit.name[:12] if item.commit else ''}"))
            for part in item.parts:
                console.print(f"  {part.symbol}: {part.text}", markup=False)
    console.print()
    console.print(summary(walk), markup=False)
