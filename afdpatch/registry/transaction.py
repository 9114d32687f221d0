"""The transaction: check every entry, import and build everything, then change everything, or leave nothing changed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from afdpatch.registry.build import Built, build
from afdpatch.registry.errors import HELD, HELD_EXPECTED, HELD_TODO, Conflict, NotInEffect, PatchError, TargetAbsent
from afdpatch.registry.forms import describe, owner_of
from afdpatch.registry.journal import Journal, Record, claimed
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.references import has_run, loaded
from afdpatch.registry.source import SourceTree, Symbol
from afdpatch.registry.verify import check_entry


def transact(
    entries: Sequence[Entry],
    lock: Lock,
    journal: Journal,
    present: Mapping[str, ModuleType | None] | None,
    wanted: Callable[[], bool],
    commit: Callable[[list[Record]], None],
) -> None:
    """Puts entries in effect, all or none.

    `install` functions run first, in the manifest's order, since they may import; then, under the journal's lock, every
    slot and every holder is filled and read back.

    Args:
        entries: what to put in effect; `official` ones are only checked.
        lock: what they are pinned to.
        journal: its lock guards the slots.
        present: the targets' modules, if they are imported already; None: import what is needed.
        wanted: asked under the lock; if false, everything is left as it was and nothing is raised.
        commit: called under the lock with the records, after the reading back.

    Raises:
        PatchError: nothing is changed then.
    """
    tree = SourceTree.installed(lock.manifest.package)
    symbols = {entry.id: _check(entry, lock, tree) for entry in entries}
    for entry in entries:
        if symbols[entry.id].kind == "value" and journal.get(entry.id) is None:
            _check_unread(entry, lock)
    built = []
    for entry in entries:
        module = None
        if entry.patches_target:
            module = _import(entry) if present is None else present[entry.module]
        if entry.kind != "official":
            built.append(build(entry, module, symbols[entry.id], tree))
    records: list[Record] = []
    try:
        journal.check_conflicts(entries)
        for item in built:
            if item.install is not None:
                records.append(_installed(item))
        # Nothing is imported while the lock is held: import hooks of other threads wait for it.
        with journal.lock:
            if wanted():
                journal.check_conflicts(entries)
                for item in built:
                    _fill(item, records, journal)
                _read_back(records, lock.manifest.package)
                commit(records)
                records = []
    except BaseException:
        journal.revert(records)
        raise
    journal.revert(records)


def _check(entry: Entry, lock: Lock, tree: SourceTree) -> Symbol:
    findings, here = check_entry(entry, lock, tree, trust_hashes=True)
    for finding in findings:
        raise finding.as_error(entry.id)
    return here[entry.target]


def _check_unread(entry: Entry, lock: Lock) -> None:
    """Makes sure that no module that keeps a value has been imported: numbers and texts aren't followed by identity."""
    left = []
    for keeper in lock.keepers.get(entry.target, ()):
        listed = keeper.kind == "import" and keeper.module in entry.holders
        if keeper.sure and has_run(keeper.module) and not listed and keeper.module != entry.module:
            left.append(str(keeper))
    if left:
        found = ", ".join(left)
        raise NotInEffect(
            HELD, patch_id=entry.id, symbol=entry.target, expected=HELD_EXPECTED, found=found, todo=HELD_TODO
        )


def _import(entry: Entry) -> ModuleType:
    try:
        return importlib.import_module(entry.module)
    except PatchError:
        raise
    except Exception as error:
        raise TargetAbsent(
            "the target's module cannot be imported",
            patch_id=entry.id,
            symbol=entry.target,
            found=f"{type(error).__name__}: {error}",
            todo=f"see why `import {entry.module}` fails in this process",
        ) from error


def _installed(item: Built) -> Record:
    assert item.install is not None
    undo = item.install()
    if not callable(undo):
        raise PatchError(
            "an install function must return its undo",
            patch_id=item.entry.id,
            symbol=item.entry.replacement,
            expected="a function without arguments",
            found=repr(undo),
        )
    return Record(item.entry, undo=undo)


def _fill(item: Built, records: list[Record], journal: Journal) -> None:
    """Fills an entry's slots; its record is in the list before anything is touched."""
    if item.slot is None or item.target is None:
        return
    target, current = item.target, vars(item.target.owner).get(item.target.name, item.target.raw)
    record = Record(item.entry, item.module, target.original, [item.slot], names=target.names)
    records.append(record)
    if current is not target.raw:
        raise Conflict(
            f"changed by {owner_of(current)} while it was being patched",
            patch_id=item.entry.id,
            symbol=item.entry.target,
            found=describe(current),
            todo="let one patch begin when the other has ended",
        )
    after = item.slot.after
    claim = claimed(after)
    if claim is not None and claim[1] is journal.get(item.entry.id):
        claim = None  # its module's code ran again, and the same function stands in the old place
    if target.names is None and (claim or any(other.slots[0].after is after for other in records[:-1] if other.slots)):
        raise Conflict(
            "its replacement stands in another target already, and could not be told from it when it is taken back",
            patch_id=item.entry.id,
            symbol=item.entry.replacement,
            todo="give each target a replacement of its own",
        )
    item.slot.fill()
    for holder in item.entry.holders:
        record.sweep(holder)


def _read_back(records: Sequence[Record], package: str) -> None:
    """Makes sure that every slot holds ours, and that no module of the package still holds an original."""
    modules = loaded(package)
    for record in records:
        if not record.holds:
            raise NotInEffect("it was assigned but isn't there", patch_id=record.entry_id)
        left = [name for name, module in modules if record.slots and record.names_in(module)]
        if left:
            raise NotInEffect(
                "modules that are not among its holders hold the original",
                patch_id=record.entry_id,
                expected="no other module to have done `from … import` of it",
                found=", ".join(sorted(left)),
                todo="add them to the entry's holders, then `afdpatch pin`",
            )
