"""The patches of one process: armed at import, applied as a whole when the role is known, taken back as a whole."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from afdpatch.registry.attest import start_method
from afdpatch.registry.errors import Conflict, NotInEffect, OtherVersion, PatchError
from afdpatch.registry.forms import describe, owner_of
from afdpatch.registry.hooks import CallLock, ImportHooks, await_import, imported_module
from afdpatch.registry.identity import identify
from afdpatch.registry.journal import MISSING, Journal, Record
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry, Manifest
from afdpatch.registry.packaged import packaged_lock
from afdpatch.registry.plan import Step, plan
from afdpatch.registry.report import Report
from afdpatch.registry.source import SourceTree
from afdpatch.registry.state import State, Sticky
from afdpatch.registry.transaction import transact
from afdpatch.registry.verify import verify


class PatchSet:
    """A lock's patches in this process.

    Args:
        lock: gives the lock for the installed package, or None if that package isn't installed. Called at the first
            use of the set; its errors come from there.
    """

    def __init__(self, lock: Callable[[], Lock | None]) -> None:
        self._find_lock = lock
        self._lock: Lock | None = None
        self._calls = CallLock()
        self._journal = Journal()
        self._hooks = ImportHooks(self._imported, self._again)
        self._armed = False
        self._generation = 0
        self._pending: dict[str, Entry] = {}
        self._checked: dict[str, Entry] = {}
        self._role: str | None = None
        self._processes: list[str] = []
        self._failure: tuple[PatchError, TracebackType | None] | None = None
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: PatchSet._forked(mine()))

    @staticmethod
    def _forked(patches: PatchSet | None) -> None:
        """In a forked process: a call that another thread was in never ends here."""
        if patches is None or patches._calls.mine:
            return
        held, patches._calls = patches._calls.held, CallLock()
        if not held:
            return
        error = PatchError(
            "forked while another thread was putting the set in effect", todo="fork before or afterwards"
        )
        patches._failure = (error, None)

    @classmethod
    def load(cls, package: str = "afdpatch.manifests", name: str = "afd") -> PatchSet:
        """The set of a packaged manifest, with the lock for the installed release.

        Nothing is read yet: a release without a lock is an error of `arm` and `apply`, not of an import.

        Args:
            package: the package that has the manifest's `locks` folder.
            name: the manifest's name.
        """
        return cls(lambda: packaged_lock(package, name))

    # ---- what a process does ----------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Puts the `when: always` entries in effect: now if their module is imported, else right after its import.

        Arming twice is arming once. If the patched package isn't installed, nothing happens.

        Raises:
            OtherVersion: there is no lock for the installed release.
            PatchError: any failure to put an entry in effect; nothing is changed then. A failure at a later import is
                raised by that import, and by every later import of the module, `arm` and `apply`.
        """
        with self._calls:
            self._raise_failure()
            if self._armed:
                return
            with self._sticky():
                lock = self._use_lock()
                if lock is None:
                    return
                entries = [entry for entry in lock.manifest.entries if entry.when == "always"]
                present = {name: imported_module(name) for name in dict.fromkeys(entry.module for entry in entries)}
                patches = [entry for entry in entries if entry.kind != "official"]
                with self._journal.lock:
                    self._armed = True
                    self._pending |= {entry.id: entry for entry in patches}
                # Watched before anything can fail: after a failure, what isn't imported yet is refused.
                for entry in patches:
                    if present[entry.module] is None and not self._hooks.watch(entry.module):
                        present[entry.module] = imported_module(entry.module)
                now = [entry for entry in entries if present[entry.module] is not None or entry.kind == "official"]
                self._transaction(now, present)

    def apply(self, *, role: str, process: str) -> None:
        """Puts the `when: role` entries of a role and a kind of process in effect, all or none.

        Applying twice is applying once. A process that is several kinds at once applies each; the role stays the same.

        Args:
            role: one of the roles that the manifest names.
            process: one of the kinds of process that the manifest names.

        Raises:
            OtherVersion: the package isn't installed, or there is no lock for the installed release.
            Conflict: another role was applied in this process, or somebody else changed a target.
            PatchError: any other failure. Nothing of this call stays in effect, and `apply` raises the same error again
                until `undo`.
        """
        with self._calls:
            self._raise_failure()
            if self._role not in (None, role):
                raise Conflict(
                    "another role was applied in this process",
                    expected=f"role {self._role!r}",
                    found=f"role {role!r}",
                    todo="use one process for one role, or undo() first",
                )
            if self._role is not None and process in self._processes:
                return
            self.arm()
            with self._sticky():
                entries = self._need_lock().manifest.entries
            _check_known(entries, role, process)
            used = [entry for entry in entries if entry.when == "role" and entry.used_by(role, process)]
            with self._sticky():
                self._require_kept()
                self._transaction([entry for entry in used if entry.id not in self._checked], None)
            self._role = role
            self._processes.append(process)

    def undo(self) -> None:
        """Takes everything back, arming and a failure included: every slot holds the very object that it held.

        Raises:
            Conflict: another set has patched over one of ours; nothing is taken back then.
            Exception: an `install` entry's undo failed; everything else is taken back nevertheless.
        """
        with self._calls:
            with self._journal.lock:
                self._journal.check_uncovered()
                self._generation += 1
                self._armed = False
                self._pending.clear()
                self._checked.clear()
                self._role = None
                self._processes.clear()
                self._failure = None
                records = self._journal.take()
            self._hooks.end()
            self._journal.revert(records)

    @contextmanager
    def applied(self, *, role: str, process: str) -> Iterator[PatchSet]:
        """The set in effect for the length of a `with` block, as `apply` and then `undo` do it."""
        self.apply(role=role, process=process)
        try:
            yield self
        finally:
            self.undo()

    # ---- what others ask --------------------------------------------------------------------------------------------

    def original(self, entry_id: str) -> Callable[..., Any]:
        """The function that an entry's target was; for methods the plain function.

        Raises:
            NotInEffect: the entry is not in effect.
        """
        record = self._journal.get(entry_id)
        if record is None or record.original is MISSING:
            raise NotInEffect("not in effect", patch_id=entry_id, todo="arm or apply the set first")
        original: Callable[..., Any] = record.original
        return original

    def plan(self, *, role: str | None = None, process: str | None = None) -> tuple[Step, ...]:
        """What `arm`, and with a role `apply`, would do now. Nothing is imported, made or changed.

        Args:
            role: as for `apply`; None: what `arm` would do.
            process: as for `apply`.

        Raises:
            OtherVersion: there is no lock for the installed release, or the package isn't installed.
            PatchError: no entry is for that role or process.
        """
        lock = self._need_lock()
        if role is not None and process is not None:
            _check_known(lock.manifest.entries, role, process)
        used = [
            entry
            for entry in lock.manifest.entries
            if entry.when == "always" or (role is not None and entry.used_by(role, process or ""))
        ]
        with self._journal.lock:
            return plan(used, lock, {entry.id: self._state(entry).value for entry in used})

    def states(self) -> dict[str, State]:
        """Each entry's state, slots read back now, in the manifest's order. Empty if there is no lock to use."""
        lock = self._lock
        with self._journal.lock:
            return {entry.id: self._state(entry) for entry in lock.manifest.entries} if lock is not None else {}

    @property
    def digest(self) -> str:
        """The digest of the manifest in use.

        Raises:
            OtherVersion: there is no lock for the installed release, or the package isn't installed.
        """
        return self._need_lock().digest

    @property
    def installed(self) -> bool:
        """Whether the package to patch is installed.

        Raises:
            OtherVersion: it is, but there is no lock for its release.
        """
        return self._use_lock() is not None

    @property
    def manifest(self) -> Manifest:
        """The frozen manifest in use. Raises as `digest` does."""
        return self._need_lock().manifest

    def used(self, role: str) -> dict[str, list[str]]:
        """For each kind of process, the entries that must be in effect in it where a role is served."""
        entries = self._need_lock().manifest.entries
        kinds = dict.fromkeys(kind for entry in entries for kind in entry.processes)
        return {kind: [entry.id for entry in entries if entry.used_by(role, kind)] for kind in kinds}

    @property
    def failure(self) -> PatchError | None:
        """What `arm`, `apply` or an import hook failed with, and what `apply` raises since."""
        return self._failure[0] if self._failure else None

    def attest(self) -> dict[str, Any]:
        """What is in effect in this process, as plain data to be compared and passed between processes.

        The keys are those of `afdpatch.registry.attest.Attestation`.
        """
        return {
            "role": self._role,
            "process": self._processes[-1] if self._processes else None,
            "processes": list(self._processes),
            "pid": os.getpid(),
            "start_method": start_method(),
            "digest": self._lock.digest if self._lock is not None else None,
            "failure": str(self.failure) if self.failure else None,
            "states": {name: state.value for name, state in self.states().items()},
        }

    def require(self) -> None:
        """Makes sure that a role was applied and that everything which was put in effect still is.

        Raises:
            NotInEffect: no role was applied, or an entry was lost.
            PatchError: the sticky failure, if there is one.
        """
        with self._calls:
            self._raise_failure()
            if self._role is None:
                raise NotInEffect("no role was applied in this process", todo="apply the set first")
            self._require_kept()

    def verify(self) -> Report:
        """Compares the lock in use with the installed source, in full.

        Raises:
            OtherVersion: there is no lock for the installed release, or the package isn't installed.
        """
        lock = self._need_lock()
        tree = SourceTree.installed(lock.manifest.package)
        return verify(lock, tree, identify(tree, lock.manifest.distributions))

    # ---- how it is done ---------------------------------------------------------------------------------------------

    def _transaction(self, entries: list[Entry], present: Mapping[str, ModuleType | None] | None) -> None:
        generation = self._generation

        def commit(records: list[Record]) -> None:
            for record in records:
                before = self._journal.get(record.entry_id)
                if before is not None:
                    record.adopt(before)
            self._journal.add(records)
            self._checked |= {entry.id: entry for entry in entries}
            for entry in entries:
                self._pending.pop(entry.id, None)

        # In an import hook, another thread's undo() may come in between: then the import goes on, unpatched.
        transact(entries, self._need_lock(), self._journal, present, lambda: self._generation == generation, commit)
        for entry in entries:
            if entry.patches_target and self._journal.get(entry.id) is not None:
                self._hooks.follow(entry.module)
            for holder in entry.holders:
                self._follow(entry, holder)

    def _follow(self, entry: Entry, holder: str) -> None:
        """Watches a holder that isn't imported yet; waits for one that another thread is importing."""
        if holder not in sys.modules and self._hooks.watch(holder):
            return
        await_import(holder)
        with self._journal.lock:
            record = self._journal.get(entry.id)
            if record is not None:
                record.sweep(holder)

    def _imported(self, name: str, module: ModuleType) -> None:
        """Called after the import of a target's or a holder's module, by the thread that imports it."""
        with self._journal.lock:
            if not self._armed:
                return
            pending = [entry for entry in self._pending.values() if entry.module == name]
            failure = self._failure
        if pending and failure is not None:
            self._hooks.refuse(name, failure[0])
            raise failure[0]
        if pending:
            try:
                with self._sticky():
                    self._transaction(pending, {name: module})
            except PatchError as error:
                self._hooks.refuse(name, error)
                raise
        with self._journal.lock:
            for entry in self._checked.values():
                record = self._journal.get(entry.id)
                if record is not None and name in entry.holders:
                    record.sweep(name)

    def _again(self, name: str, module: ModuleType) -> None:
        """Called when a patched module's code has run again: all that it had is put in effect in what is there now."""
        with self._journal.lock:
            records = [
                record
                for record in self._journal.records.values()
                if record.module is not None and record.module.__name__ == name
            ]
            failure = self._failure
        try:
            if failure is not None and records:
                raise failure[0]
            with self._sticky():
                self._transaction([record.entry for record in records], {name: module})
        except BaseException:
            with self._journal.lock:
                for record in records:
                    if self._journal.get(record.entry_id) is record:
                        record.break_off(module)
            raise

    # ---- small things -----------------------------------------------------------------------------------------------

    def _require_kept(self) -> None:
        for name, state in self.states().items():
            if state is State.LOST:
                record = self._journal.get(name)
                lost = [slot.current for slot in record.lost] if record is not None else []
                over = [f"{describe(value)}, of {owner_of(value)}" for value in lost]
                raise NotInEffect(
                    "somebody took it out of effect, or imported its target past the import hook",
                    patch_id=name,
                    symbol=record.entry.target if record is not None else None,
                    found=", ".join(over) or "its module was imported anew, past its hook",
                    todo="see what assigns to its target, reloads its module or replaces sys.meta_path",
                )

    def _state(self, entry: Entry) -> State:
        record = self._journal.get(entry.id)
        if record is not None:
            return State.APPLIED if record.holds else State.LOST
        if entry.id in self._pending:
            module = sys.modules.get(entry.module)
            loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
            return State.PENDING if module is None or loading else State.LOST
        return State.CHECKED if entry.id in self._checked else State.IDLE

    def _use_lock(self) -> Lock | None:
        if self._lock is None:
            self._lock = self._find_lock()
            self._journal.manifest = self._lock.manifest.name if self._lock is not None else ""
        return self._lock

    def _need_lock(self) -> Lock:
        lock = self._use_lock()
        if lock is None:
            raise OtherVersion("the package to patch is not installed", todo="install it")
        return lock

    def _raise_failure(self) -> None:
        if self._failure is not None:
            error, traceback = self._failure
            raise error.with_traceback(traceback)

    def _sticky(self) -> Sticky:
        generation = self._generation

        def fail(error: PatchError) -> None:
            if self._failure is None and self._generation == generation:
                self._failure = (error, error.__traceback__)

        return Sticky(fail)


def _check_known(entries: Iterable[Entry], role: str, process: str) -> None:
    """Whether an entry is for a role, and one for a process; an entry of roles that names no process is for each.

    Raises:
        PatchError: there is none.
    """
    used = [entry for entry in entries if entry.when == "role"]
    for what, name, known, any_name in (
        ("role", role, {name for entry in entries for name in entry.roles}, False),
        (
            "process",
            process,
            {name for entry in entries for name in entry.processes},
            not all(e.processes for e in used),
        ),
    ):
        if name not in known and not any_name:
            raise PatchError(
                f"no entry of the manifest is for this {what}",
                expected=" | ".join(sorted(known)) or f"an entry that names a {what}",
                found=repr(name),
            )
