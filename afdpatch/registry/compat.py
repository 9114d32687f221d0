"""How each patch stands in a release: the cells of the matrix patch x release. Which release it is plays no part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from afdpatch.registry.census import holders_of
from afdpatch.registry.keepers import keepers_of
from afdpatch.registry.lock import Keeper, Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.moved import Likeness, find_moved
from afdpatch.registry.source import SourceTree, Symbol, SymbolAbsent, SymbolMoved
from afdpatch.registry.unsound import why_unpatchable


class Standing(str, Enum):
    """How a patch, or one symbol that it stands on, is in a release. Of several, the last one below counts."""

    SAME = "same"
    """As it was pinned."""

    OBSOLETE = "obsolete"
    """As it was pinned, but the patch's `remove_when` is true."""

    BODY = "body"
    """What it does changed."""

    INTERFACE = "interface"
    """How it is used changed: signature, annotations, decorators, bases, or the modules that hold it."""

    MOVED = "moved"
    """It is elsewhere, as an import in the old place or its body in another place says."""

    GONE = "gone"
    """It isn't there, and nothing tells where it went."""

    @classmethod
    def worst(cls, standings: Iterable[Standing]) -> Standing:
        """The one that counts."""
        order = list(cls)
        return max(standings, key=order.index, default=cls.SAME)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this: that of `afdpatch verify` for the same thing."""
        return {"same": 0, "obsolete": 6, "body": 4, "interface": 4, "moved": 3, "gone": 3}[self.value]


@dataclass(frozen=True)
class Absence:
    """A symbol that a release doesn't have where it was pinned.

    Attributes:
        found: what is there.
        moved_to: where it may be now, as `module:Qualified.name`; None if nothing tells.
        evidence: what speaks for that.
        likely: whether it surely is the same thing: an import leads there, or its body is the same.
    """

    found: str
    moved_to: str | None = None
    evidence: str = ""
    likely: bool = False


class View(Protocol):
    """A release, seen as the places of symbols: a source tree, or what was written down about one."""

    def look(self, pinned: Symbol) -> Symbol | Absence:
        """A pinned symbol as the release has it."""

    def holders(self, target: str) -> tuple[str, ...]:
        """The modules that hold a patched function of a module."""

    def keepers(self, target: Symbol, holders: tuple[str, ...]) -> tuple[Keeper, ...]:
        """Who else keeps the original of a target, or overrides it; a record of a release doesn't know."""

    def unpatchable(self, target: Symbol) -> str | None:
        """Why a target can't be patched soundly, or None; a record of a release doesn't know."""


class TreeView:
    """A source tree as a `View`."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree

    def look(self, pinned: Symbol) -> Symbol | Absence:
        """A pinned symbol as the tree has it."""
        try:
            return self.tree.resolve(pinned.name)
        except SymbolMoved as error:
            return Absence(str(error), error.definition, "imported from there", likely=True)
        except SymbolAbsent as error:
            moved = find_moved(self.tree, pinned, most=1)
            if not moved:
                return Absence(str(error))
            best = moved[0]
            evidence = f"{best.file}:{best.line}, {best.likeness.value}"
            return Absence(str(error), best.symbol, evidence, best.likeness in (Likeness.SAME, Likeness.BODY))

    def holders(self, target: str) -> tuple[str, ...]:
        """The modules that hold a patched function of a module."""
        return holders_of(self.tree, target)

    def keepers(self, target: Symbol, holders: tuple[str, ...]) -> tuple[Keeper, ...]:
        """Who else keeps the original of a target, or overrides it."""
        return keepers_of(self.tree, target.name, target.kind, holders)

    def unpatchable(self, target: Symbol) -> str | None:
        """Why a target can't be patched soundly, or None."""
        return why_unpatchable(self.tree, target)


@dataclass(frozen=True)
class Part:
    """One thing that a patch stands on, and how it is in a release.

    Attributes:
        symbol: the target, a relied-on symbol, or a module that holds the target.
        standing: how it is.
        detail: what is there, in a few words; empty if it is the same.
    """

    symbol: str
    standing: Standing
    detail: str = ""

    @property
    def text(self) -> str:
        """The standing and the detail in words."""
        return self.detail if self.standing.value in self.detail else f"{self.standing.value}: {self.detail}"


@dataclass(frozen=True)
class Cell:
    """One patch in one release.

    Attributes:
        entry_id: the patch.
        parts: everything that it stands on.
        obsolete: its `remove_when` is true there.
    """

    entry_id: str
    parts: tuple[Part, ...]
    obsolete: bool = False

    @property
    def standing(self) -> Standing:
        """How the patch is, as a whole."""
        own = [Standing.OBSOLETE] if self.obsolete else []
        return Standing.worst([*own, *(part.standing for part in self.parts)])

    def as_dict(self) -> dict[str, Any]:
        """Plain data; what is the same is left out."""
        parts = [vars(part) | {"standing": part.standing.value} for part in self.parts]
        return {
            "id": self.entry_id,
            "standing": self.standing.value,
            "parts": [part for part in parts if part["standing"] != "same"],
        }


@dataclass(frozen=True)
class Column:
    """All patches in one release.

    Attributes:
        label: the release's version, or what its source is called.
        version: the version that it reports, if any.
        commit: the commit that it is known to be of, if any.
        cells: one a patch, in the manifest's order.
    """

    label: str
    version: str | None
    commit: str | None
    cells: tuple[Cell, ...]

    @property
    def standing(self) -> Standing:
        """The worst of all patches."""
        return Standing.worst(cell.standing for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        head = {"release": self.label, "version": self.version, "commit": self.commit, "standing": self.standing.value}
        return head | {"patches": [cell.as_dict() for cell in self.cells]}


def examine(lock: Lock, view: View, probes: Mapping[str, bool | str] | None = None) -> tuple[Cell, ...]:
    """How each entry of a lock stands in a release.

    Args:
        lock: what was pinned.
        view: the release.
        probes: what each entry's `remove_when` gave there, if it was asked.
    """
    return tuple(
        Cell(entry.id, examine_entry(entry, lock, view), (probes or {}).get(entry.id) is True)
        for entry in lock.manifest.entries
    )


def examine_entry(entry: Entry, lock: Lock, view: View) -> tuple[Part, ...]:
    """How everything that one entry stands on is in a release."""
    looked = {name: view.look(lock.symbols[name]) for name in entry.symbols}
    parts = [compare(lock.symbols[name], here) for name, here in looked.items()]
    target = looked[entry.target]
    if isinstance(target, Absence):
        return tuple(parts)
    now = view.holders(entry.target) if entry.target in lock.holders else ()
    if entry.target in lock.holders:
        parts += [
            Part(name, Standing.INTERFACE, "no longer holds the target") for name in entry.holders if name not in now
        ]
        parts += [
            Part(name, Standing.INTERFACE, "holds the target too")
            for name in now
            if name not in lock.holders[entry.target]
        ]
    if entry.patches_target:
        known = {keeper.identity for keeper in lock.keepers.get(entry.target, ())}
        parts += [
            Part(keeper.module, Standing.INTERFACE, f"keeps or overrides the target: {keeper}")
            for keeper in view.keepers(target, now)
            if keeper.kind != "import" and keeper.identity not in known
        ]
        reason = view.unpatchable(target)
        parts += [Part(entry.target, Standing.INTERFACE, f"it can't be patched soundly: {reason}")] if reason else []
    return tuple(parts)


def compare(pinned: Symbol, here: Symbol | Absence) -> Part:
    """How a symbol is, compared with what was pinned."""
    if isinstance(here, Absence):
        if here.likely:
            return Part(pinned.name, Standing.MOVED, f"now {here.moved_to} ({here.evidence})")
        maybe = f"; maybe {here.moved_to} ({here.evidence})" if here.moved_to else ""
        return Part(pinned.name, Standing.GONE, here.found + maybe)
    changed = [part for part in ("interface", "body") if getattr(pinned, part) != getattr(here, part)]
    if not changed:
        return Part(pinned.name, Standing.SAME)
    standing = Standing.INTERFACE if changed[0] == "interface" else Standing.BODY
    return Part(pinned.name, standing, f"{' and '.join(changed)} changed ({here.file}:{here.line})")
