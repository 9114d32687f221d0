"""Progress of long commands, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""How often a line is written where there is no terminal; a shorter command writes none."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Shows how far a loop is.

    Args:
        what: what is being done.
        total: how many steps there are.

    Yields:
        A function to be called with the number of steps done and the name of what comes next.
    """
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(done: int, name: str) -> None:
            nonlocal last
            if time.monotonic() - last >= EVERY_S:
                last = time.monotonic()
                print(f"{what}: {done} of {total}, {name}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def step(done: int, name: str) -> None:
            bar.update(task, completed=done, description=f"{what}: {name}")

        yield step


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """A table for Markdown; `|` in a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
