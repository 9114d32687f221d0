"""A package's chain of calls, declared in YAML: boxes with symbols, found in the source at hand, with their patches.

Data only; `reports.map_text` and `reports.map_html` show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afdpatch.registry.errors import ManifestError
from afdpatch.registry.links import link_here
from afdpatch.registry.manifest import Entry
from afdpatch.registry.report import Report, Verdict
from afdpatch.registry.source import SourceTree, SymbolAbsent

FORMAT = 1


@dataclass(frozen=True)
class Box:
    """A station of the chain, as declared.

    Attributes:
        id: unique in the chain.
        title: what people call it.
        process: the kind of process that it runs in; a key of the chain's processes.
        symbols: `module:Qualified.name` of what it is, the main one first.
        does: what it does, in a sentence.
        beside: the box that it hangs on; None for a box of the chain itself.
        roles: what it does in each role.
    """

    id: str
    title: str
    process: str
    symbols: tuple[str, ...]
    does: str
    beside: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """The boxes in the order of calls; what hangs beside a box comes after it.

    Attributes:
        title: a heading.
        about: a sentence or more below it.
        processes: the kinds of process in their order: title and a remark.
        boxes: the stations.
    """

    title: str
    about: str
    processes: Mapping[str, tuple[str, str]]
    boxes: tuple[Box, ...]

    @classmethod
    def read(cls, path: Path) -> Chain:
        """Reads a chain's YAML.

        Raises:
            ManifestError: there is no such file, or it isn't a chain: the file, the box and the key are named.
        """
        import yaml

        from afdpatch.registry.yamls import load

        try:
            data = load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            todo = "write one (docs/reports.md), or name one with --chain"
            raise ManifestError(f"{path}: the chain cannot be read", found=str(error), todo=todo) from error
        try:
            processes = {name: (item["title"], item["about"]) for name, item in data["processes"].items()}
            boxes = tuple(_box(raw, f"{path}: box number {index + 1}") for index, raw in enumerate(data["boxes"]))
            chain = cls(data["title"], data["about"].strip(), processes, boxes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path}: not a chain", found=f"{type(error).__name__}: {error}") from error
        seen: dict[str, Box] = {}
        for box in boxes:
            where = f"{path}: box {box.id!r}"
            if box.id in seen:
                raise ManifestError(f"{where}: its id is used twice")
            if box.process not in processes:
                raise ManifestError(f"{where}: unknown process", expected=", ".join(processes), found=box.process)
            if box.beside is not None and (box.beside not in seen or seen[box.beside].beside is not None):
                raise ManifestError(
                    f"{where}: key 'beside'", expected="a box of the chain itself, above it", found=box.beside
                )
            seen[box.id] = box
        return chain


@dataclass(frozen=True)
class Place:
    """A symbol in the source at hand.

    Attributes:
        symbol: `module:Qualified.name`.
        file: its file, from the directory that holds the package; None if it is absent.
        line: its line.
        link: its place at the pinned commit, on the forge.
        absent: why it wasn't found.
    """

    symbol: str
    file: str | None = None
    line: int | None = None
    link: str | None = None
    absent: str | None = None

    @property
    def text(self) -> str:
        """`file:line`, or `absent` and why."""
        return f"{self.file}:{self.line}" if self.file else f"absent: {self.absent}"


@dataclass(frozen=True)
class Hook:
    """An entry at a box.

    Attributes:
        entry: the entry.
        verdict: the gravest of its findings.
        place: where its target is.
    """

    entry: Entry
    verdict: Verdict
    place: Place


@dataclass(frozen=True)
class Station:
    """A box with what was found: its symbols' places, the entries that hook it, and those that stand on it."""

    box: Box
    places: tuple[Place, ...]
    hooks: tuple[Hook, ...]
    relied_on_by: tuple[str, ...]


@dataclass(frozen=True)
class Map:
    """A chain in the source at hand.

    Attributes:
        chain: as declared.
        report: the verdicts on the patches.
        stations: one for each box, in the chain's order.
        elsewhere: entries whose target is in no box.
    """

    chain: Chain
    report: Report
    stations: tuple[Station, ...]
    elsewhere: tuple[Hook, ...]

    @property
    def spine(self) -> tuple[tuple[Station, tuple[Station, ...]], ...]:
        """The boxes of the chain itself, each with those beside it."""
        return tuple(
            (station, tuple(other for other in self.stations if other.box.beside == station.box.id))
            for station in self.stations
            if station.box.beside is None
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        manifest = self.report.lock.manifest
        return {
            "format": FORMAT,
            "title": self.chain.title,
            "package": manifest.package,
            "version": {"pinned": manifest.version, "found": self.report.identity.version},
            "commit": manifest.commit,
            "verdict": self.report.verdict.value,
            "boxes": [
                {
                    "id": station.box.id,
                    "title": station.box.title,
                    "process": station.box.process,
                    "beside": station.box.beside,
                    "does": station.box.does,
                    "roles": dict(station.box.roles),
                    "symbols": [dict(vars(place)) for place in station.places],
                    "patches": [_hook_dict(hook) for hook in station.hooks],
                    "relied_on_by": list(station.relied_on_by),
                }
                for station in self.stations
            ],
            "elsewhere": [_hook_dict(hook) for hook in self.elsewhere],
        }


def trace(chain: Chain, report: Report, tree: SourceTree) -> Map:
    """Finds a chain in a source tree, which is parsed, not imported.

    Args:
        chain: what to find.
        report: the verdicts on a lock in the same tree.
        tree: the source.
    """
    same = report.identity.version == report.lock.manifest.version and (
        report.identity.has_commit(report.lock.manifest.commit) is not False
    )
    places = {symbol: _place(symbol, report, tree, same) for box in chain.boxes for symbol in box.symbols}
    hooks = [_hook(entry.entry, entry.verdict, entry.file, entry.line, report, tree, same) for entry in report.entries]
    owner = {hook.entry.id: _owner(chain.boxes, hook.entry.target) for hook in hooks}
    stations = []
    for box in chain.boxes:
        own = tuple(hook for hook in hooks if owner[hook.entry.id] is box)
        names = {hook.entry.id for hook in own}
        relied = tuple(
            hook.entry.id
            for hook in hooks
            if hook.entry.id not in names and any(_owner(chain.boxes, name) is box for name in hook.entry.relies)
        )
        stations.append(Station(box, tuple(places[symbol] for symbol in box.symbols), own, relied))
    elsewhere = tuple(hook for hook in hooks if owner[hook.entry.id] is None)
    return Map(chain, report, tuple(stations), elsewhere)


def _box(raw: Mapping[str, Any], where: str) -> Box:
    allowed = set(Box.__dataclass_fields__)
    unknown = sorted(set(raw) - allowed)
    missing = sorted({"id", "title", "process", "symbols", "does"} - set(raw))
    if unknown or missing:
        what = f"unknown key {unknown[0]!r}" if unknown else f"key {missing[0]!r} is missing"
        raise ManifestError(f"{where}: {what}", expected=", ".join(sorted(allowed)))
    roles = raw.get("roles", {})
    texts = [raw["id"], raw["title"], raw["process"], raw["does"], *roles, *roles.values(), *raw["symbols"]]
    wrong = [value for value in texts if not isinstance(value, str)]
    if wrong or not raw["symbols"] or not all(":" in symbol for symbol in raw["symbols"]):
        raise ManifestError(f"{where}: texts, and symbols as module:Qualified.name, are expected", found=repr(wrong))
    return Box(**{**raw, "symbols": tuple(raw["symbols"]), "roles": dict(roles)})


def _owner(boxes: Iterable[Box], target: str) -> Box | None:
    """The box that a symbol belongs to: it is one of the box's symbols or a member of one; the longest match counts."""
    matches = [
        (len(symbol), -index, box)
        for index, box in enumerate(boxes)
        for symbol in box.symbols
        if target == symbol or target.startswith(f"{symbol}.")
    ]
    return max(matches, key=lambda match: match[:2])[2] if matches else None


def _place(symbol: str, report: Report, tree: SourceTree, same_release: bool) -> Place:
    try:
        file, line = find(tree, symbol)
    except SymbolAbsent as error:
        return Place(symbol, absent=str(error))
    return Place(symbol, file, line, link_here(report.lock, tree, file, line, same_release=same_release))


def _hook(
    entry: Entry, verdict: Verdict, file: str, line: int, report: Report, tree: SourceTree, same_release: bool
) -> Hook:
    absent = [
        finding.found
        for item in report.entries
        if item.entry is entry
        for finding in item.findings
        if finding.verdict is Verdict.ABSENT and finding.symbol == entry.target
    ]
    if absent:
        return Hook(entry, verdict, Place(entry.target, absent=absent[0]))
    link = link_here(report.lock, tree, file, line, same_release=same_release)
    return Hook(entry, verdict, Place(entry.target, file, line, link))


def find(tree: SourceTree, symbol: str) -> tuple[str, int]:
    """A symbol's file and line.

    Raises:
        SymbolAbsent: it isn't there; the text says what was found.
    """
    source, nodes = tree.nodes(symbol)
    return source.file, nodes[-1].lineno


def _hook_dict(hook: Hook) -> dict[str, Any]:
    return {
        "id": hook.entry.id,
        "kind": hook.entry.kind,
        "when": hook.entry.when,
        "target": hook.entry.target,
        "verdict": hook.verdict.value,
        "file": hook.place.file,
        "line": hook.place.line,
        "link": hook.place.link,
        "why": hook.entry.why,
    }
