"""The journal: every change that is in effect, and how each is taken back. The one mutable state of the registry."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

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
        entry_id: the entry's id.
        module: the target's module; None for `install`.
        original: the function that the target was; None for `install`.
        slots: the target's slot, then those of its holders.
        undo: for `install`, what takes it back.
    """

    entry_id: str
    module: ModuleType | None = None
    original: Callable[..., Any] | None = None
    slots: list[Slot] = field(default_factory=list)
    undo: Callable[[], object] | None = None

    @property
    def holds(self) -> bool:
        """Whether everything that the entry changed is still so, as far as that can be seen."""
        imported_again = self.module is not None and sys.modules.get(self.module.__name__) is not self.module
        return not imported_again and all(slot.holds for slot in self.slots)

    def names_in(self, module: ModuleType) -> list[str]:
        """The names by which a module still holds the original function."""
        return [name for name, value in list(vars(module).items()) if value is self.original]

    def sweep(self, holder: str) -> None:
        """Rebinds every name of a module, if it is imported, that holds the original function."""
        module = sys.modules.get(holder)
        if module is not None and self.original is not None:
            for name in self.names_in(module):
                slot = Slot(module, name, self.slots[0].after)
                self.slots.append(slot)
                slot.fill()

    def reclaim(self) -> None:
        """Gives the original to modules of the package that imported ours by name while it was in effect."""
        if self.module is None or self.original is None or self.slots[0].owner is not self.module:
            return
        package, ours = self.module.__name__.partition(".")[0], self.slots[0].after
        for holder, module in list(sys.modules.items()):
            if holder.partition(".")[0] == package and isinstance(module, ModuleType):
                for name in [name for name, value in list(vars(module).items()) if value is ours]:
                    setattr(module, name, self.original)


class Journal:
    """The records in effect, in the order of application.

    Attributes:
        lock: held for every reading and changing of slots and records, and never while anything is imported: a thread
            that imports a patched module holds that module's import lock when it comes here.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.records: dict[str, Record] = {}

    def get(self, entry_id: str) -> Record | None:
        """An entry's record, or None if it changed nothing."""
        with self.lock:
            return self.records.get(entry_id)

    def add(self, records: Iterable[Record]) -> None:
        """Takes up the records of a transaction that went through."""
        with self.lock:
            self.records |= {record.entry_id: record for record in records}

    def take(self) -> list[Record]:
        """Empties the journal and gives what was in it."""
        with self.lock:
            records = list(self.records.values())
            self.records.clear()
            return records

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
