"""A chain for a terminal: the stations down a line, what hangs beside them, and the patches below each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from afdpatch.registry.chain import Hook, Map, Station
from afdpatch.registry.reports.text import STYLES, verdict_text


def print_map(map: Map, console: Console) -> None:
    """Prints the chain."""
    report = map.report
    manifest = report.lock.manifest
    console.print(Text(map.chain.title, style="bold"))
    console.print(f"{manifest.package} in {report.source}: {report.identity}", markup=False)
    process = None
    for index, (station, beside) in enumerate(map.spine):
        if station.box.process != process:
            process = station.box.process
            title, about = map.chain.processes[process]
            console.print("│" if index else "", markup=False)
            console.print(Text.assemble((title, "bold underline"), f"  {about}"))
        last = index + 1 == len(map.spine)
        _station(console, station, "● ", "  " if last and not beside else "│ ")
        for number, other in enumerate(beside):
            end = number + 1 == len(beside)
            under = "  " if last else "│ "
            _station(console, other, ("└─" if last and end else "├─") + "○ ", under + ("  " if end else "│ "))
    if map.elsewhere:
        console.print()
        console.print(Text("In no box of the chain", style="bold underline"))
        _hooks(console, map.elsewhere, "  ")
    console.print()
    verdict, colon, rest = report.summary.partition(":")
    console.print(Text.assemble((verdict, STYLES.get(report.verdict, "bold red")), colon, rest))


def _station(console: Console, station: Station, mark: str, under: str) -> None:
    box = station.box
    console.print(Text.assemble(mark, (box.title, "bold"), f"  {box.does}"))
    for place in station.places:
        name = place.symbol.rpartition(":")[2]
        style = "dim" if place.file else "red"
        console.print(Text.assemble(under, f"  {name}  ", (place.text, style)))
    for role, does in box.roles.items():
        console.print(Text.assemble(under, f"  {role}: {does}"))
    _hooks(console, station.hooks, under)
    if station.relied_on_by:
        console.print(Text.assemble(under, ("  relied on by ", "dim"), (", ".join(station.relied_on_by), "dim")))


def _hooks(console: Console, hooks: Sequence[Hook], under: str) -> None:
    for hook in hooks:
        entry = hook.entry
        head = (under, "  ▶ ", (entry.id, "bold cyan"), f"  {entry.kind}, {entry.when}, ", verdict_text(hook.verdict))
        console.print(Text.assemble(*head))
        console.print(Text.assemble(under, "    ", (f"{entry.qualname}  {hook.place.text}", "dim")))
