"""The journal: every change that is in effect, and how each is taken back. The one mutable state of the registry."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from afdpatch.registry import references
from afdpatch.registry.errors import Conflict
from afdpatch.registry.manifest import Entry

logger = logging.getLogger(__name__)


class _Missing:
    def __repr__(self) -> str:
        return "<no attribute>"


MISSING: Final = _Missing()


@dataclass(eq=False)
class Slot:
    """A place in a module or class that holds another object than it did.

    Attributes:
        owner: the module or class.
        name: the attribute.
        after: what we put there: for methods the descriptor, as it stands in `__dict__`.
        before: what stood in the owner's own `__dict__`; `MISSING` if nothing did.
        filled: whether `fill` was begun, and `before` is known.
    """

    owner: Any
    name: str
    after: Any
    before: Any = MISSING
    filled: bool = False

    @property
    def current(self) -> Any:
        """What is in the owner's own `__dict__` now, or `MISSING`."""
        return vars(self.owner).get(self.name, MISSING)

    @property
    def holds(self) -> bool:
        """Whether our object is there."""
        return self.current is self.after

    def fill(self) -> None:
        """Puts our object there and remembers what was there."""
        self.before = self.current
        self.filled = True
        setattr(self.owner, self.name, self.after)

    def restore(self) -> None:
        """Puts the very object back that was there, or deletes the attribute that wasn't there.

        What somebody else has put over ours is lost; that is logged.
        """
        current = self.current
        if not self.filled or current is self.before:
            return
        if current is not self.after:
            where = f"{getattr(self.owner, '__module__', '')}.{getattr(self.owner, '__qualname__', self.owner)}"
            logger.warning("%s.%s: %r, put over our patch, is removed with it", where.lstrip("."), self.name, current)
        if self.before is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


@dataclass(eq=False)
class Record:
    """What one entry changed.

    Attributes:
        entry: the entry.
        module: the target's module; None for `install`.
        original: what the target was: a function, a class or a value; `MISSING` for `install`.
        slots: the target's slot, then those of its holders.
        undo: for `install`, what takes it back.
        names: for a value that may be one object for many reasons, what tells the names by which a module, imported
            before or later, holds it by `from … import`; None: every name that holds the object.
        alike: of such a value, the names that held one like ours before ours was put in effect.
        past: of a module whose code ran again, what the target was before, and what stood in its place.
        broken: its module's code ran again, and the entry could not be put in effect again.
    """

    entry: Entry
    module: ModuleType | None = None
    original: Any = MISSING
    slots: list[Slot] = field(default_factory=list)
    undo: Callable[[], object] | None = None
    names: Callable[[str], tuple[str, ...]] | None = None
    alike: frozenset[tuple[str, str]] = frozenset()
    past: list[tuple[Any, Any]] = field(default_factory=list)
    broken: bool = False

    def __post_init__(self) -> None:
        after = self.slots[0].after if self.slots else MISSING
        modules = [module for _, module in references.loaded(self.entry.package)] if self.names else []
        self.alike = frozenset((item.__name__, name) for item in modules for name in self._names_of(item, after))

    @property
    def entry_id(self) -> str:
        """The entry's id."""
        return self.entry.id

    @property
    def holds(self) -> bool:
        """Whether everything that the entry changed is still so, as far as that can be seen."""
        imported_again = self.module is not None and sys.modules.get(self.module.__name__) is not self.module
        return not (imported_again or self.broken) and all(slot.holds or _held_below(slot) for slot in self.slots)

    @property
    def lost(self) -> list[Slot]:
        """The slots that hold neither ours nor what another set has declared to put over it."""
        return [slot for slot in self.slots if not slot.holds and not _held_below(slot)]

    def names_in(self, module: ModuleType) -> list[str]:
        """The names by which a module still holds the original."""
        return self._names_of(module, self.original)

    def _names_of(self, module: ModuleType, value: object) -> list[str]:
        held = [name for name, item in list(vars(module).items()) if item is value]
        return (
            held if self.names is None or not held else [name for name in self.names(module.__name__) if name in held]
        )

    def sweep(self, holder: str) -> None:
        """Rebinds every name of a module, if it is imported, that holds the original."""
        module = sys.modules.get(holder)
        if module is not None and self.original is not MISSING:
            for name in self.names_in(module):
                slot = Slot(module, name, self.slots[0].after)
                self.slots.append(slot)
                slot.fill()

    def adopt(self, before: Record) -> None:
        """Takes over what the entry changed before its module's code ran again: holders and old classes keep ours."""
        self.slots += before.outside(self.module)
        self.alike = before.alike
        self.past += [*before.past, (before.original, before.slots[0].after)] if before.slots else before.past

    def break_off(self, module: ModuleType) -> None:
        """Its module's code ran again, and it isn't in effect there: nothing must be put back into what is there."""
        if self.slots and not self.broken:
            self.past.append((self.original, self.slots[0].after))
        self.broken, self.slots = True, self.outside(module)

    def outside(self, module: ModuleType | None) -> list[Slot]:
        """The slots that are not in a module itself, whose code ran again and filled its own anew."""
        return [slot for slot in self.slots if slot.owner is not module]

    def reclaim(self) -> None:
        """Gives the original to modules of the package that imported ours by name while it was in effect."""
        if self.module is None or "." in self.entry.qualname:
            return
        own = [(self.original, self.slots[0].after)] if self.slots and not self.broken else []
        for _, module in references.loaded(self.module.__name__.partition(".")[0]):
            for original, ours in [*own, *self.past]:
                for name in self._names_of(module, ours):
                    if (module.__name__, name) not in self.alike:
                        setattr(module, name, original)


_LOCK = threading.RLock()
# A process forked by another thread must not see half of a transaction, or this lock held by nobody.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_IN_EFFECT: list[Journal] = []
"""The journals that have records: what several sets change is known to all of them."""


def over(slot: Slot) -> tuple[str, Record, Slot] | None:
    """What another set has put over a slot of ours: its manifest's name, its record and its slot."""
    for journal in _IN_EFFECT:
        for record in journal.records.values():
            for other in record.slots:
                place = other.owner is slot.owner and other.name == slot.name
                if place and other.before is slot.after is not other.after:
                    return journal.manifest, record, other
    return None


def _held_below(slot: Slot) -> bool:
    upper = over(slot)
    return upper is not None and (upper[2].holds or _held_below(upper[2]))


def claimed(after: object) -> tuple[str, Record] | None:
    """Who put an object into its slot: the manifest's name and the record; None if no set did."""
    with _LOCK:
        for journal in _IN_EFFECT:
            for record in journal.records.values():
                if record.slots and record.slots[0].after is after:
                    return journal.manifest, record
    return None


class Journal:
    """The records of one set in effect, in the order of application.

    Attributes:
        manifest: the name of the set's manifest.
        lock: held for every reading and changing of slots and records, and never while anything is imported: a thread
            that imports a patched module holds that module's import lock when it comes here. One for all sets.
    """

    def __init__(self) -> None:
        self.manifest = ""
        self.lock = _LOCK
        self.records: dict[str, Record] = {}

    def get(self, entry_id: str) -> Record | None:
        """An entry's record, or None if it changed nothing."""
        with self.lock:
            return self.records.get(entry_id)

    def add(self, records: Iterable[Record]) -> None:
        """Takes up the records of a transaction that went through."""
        with self.lock:
            self.records |= {record.entry_id: record for record in records}
            if self.records and self not in _IN_EFFECT:
                _IN_EFFECT.append(self)

    def take(self) -> list[Record]:
        """Empties the journal and gives what was in it."""
        with self.lock:
            records = list(self.records.values())
            self.records.clear()
            if self in _IN_EFFECT:
                _IN_EFFECT.remove(self)
            return records

    def check_conflicts(self, entries: Iterable[Entry]) -> None:
        """Makes sure that no other set has an entry in effect that conflicts with one of ours.

        Raises:
            Conflict: one has; both are named.
        """
        with self.lock:
            others = [(one.manifest, item) for one in _IN_EFFECT if one is not self for item in one.records.values()]
        for entry in entries:
            mine = f"{self.manifest}/{entry.id}"
            for manifest, record in others:
                theirs = f"{manifest}/{record.entry_id}"
                if theirs in entry.conflicts or mine in record.entry.conflicts:
                    raise Conflict(
                        f"conflicts with {theirs}, which is in effect in this process",
                        patch_id=entry.id,
                        symbol=entry.target,
                        expected=f"not both {mine} and {theirs}, as the `conflicts` of one of them says",
                        todo="use one of the two sets in a process",
                    )

    def check_uncovered(self) -> None:
        """Makes sure that no other set has patched over a slot of ours, since taking ours back would lose theirs.

        Raises:
            Conflict: one has; both are named.
        """
        for record in self.records.values():
            upper = next((found for slot in record.slots if (found := over(slot)) is not None), None)
            if upper is not None:
                raise Conflict(
                    f"{upper[0]}/{upper[1].entry_id} is in effect over it",
                    patch_id=record.entry_id,
                    symbol=record.entry.target,
                    todo=f"undo the set {upper[0]!r} first",
                )

    def revert(self, records: Iterable[Record]) -> None:
        """Takes records back, the last first: slots, then what `install` entries did.

        Raises:
            Exception: the first of the exceptions on the way; everything else is taken back nevertheless.
        """
        first: Exception | None = None
        for record in reversed(list(records)):
            steps: list[Callable[[], object]] = [slot.restore for slot in reversed(record.slots)]
            steps = [self._locked(step) for step in [*steps, record.reclaim]]
            for step in [*steps, record.undo] if record.undo else steps:
                try:
                    step()
                except Exception as error:
                    logger.exception("patch %r: taking it back failed", record.entry_id)
                    first = first or error
        if first is not None:
            raise first

    def _locked(self, step: Callable[[], object]) -> Callable[[], None]:
        def locked() -> None:
            with self.lock:
                step()

        return locked
