"""Import hooks: to be called when a module has been imported, each time again, and to refuse a module for good.

wrapt calls the hook the first time only. A module whose hook failed would be imported unpatched the second time, hence
the refusals; one that is reloaded, or imported anew, would lose its patches, hence the followers.
"""

from __future__ import annotations

import _frozen_importlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from afdpatch.registry.errors import Conflict, PatchError


class ImportHooks:
    """Calls one function after the import of any of a growing set of modules.

    Args:
        imported: called with the module's name and the module, once its own code has run and before the importer goes
            on. What it raises fails the import.
        again: called likewise each time that the code of a followed module has run again.
    """

    def __init__(self, imported: Callable[[str, ModuleType], None], again: Callable[[str, ModuleType], None]) -> None:
        self._imported = imported
        self._follower = _Follower(again)
        self._watched: set[str] = set()
        self._refusals = _Refusals()

    def watch(self, name: str) -> bool:
        """Watches a module whose import hasn't begun; more than once is once.

        If another thread began it meanwhile, past the hook, it is waited for and the function is called here.

        Returns:
            False if it is half imported and cannot be waited for, since that import waits for this thread.

        Raises:
            PatchError: what the function raised for such a module.
        """
        while True:
            called = name not in self._watched and self._register(name)
            await_import(name)
            module = sys.modules.get(name)
            if module is not None or not called:
                break
            self._watched.discard(name)  # the import that had begun has failed, and wrapt keeps no hook for the next
        if name in self._watched and module is not None:
            if _half_imported(module):
                self._watched.discard(name)
                return False
            self._fire(name, module)
        return True

    def _register(self, name: str) -> bool:
        """Registers the hook of a module; whether wrapt called it at once, for an import that has begun."""
        import wrapt

        registering = threading.get_ident()
        called = False

        def hook(module: ModuleType) -> None:
            nonlocal called
            if threading.get_ident() == registering:
                called = True  # the module may be half imported
            else:
                self._fire(name, module)

        self._watched.add(name)
        wrapt.register_post_import_hook(hook, name)
        registering = 0
        return called

    def _fire(self, name: str, module: ModuleType) -> None:
        self._watched.discard(name)
        self._imported(name, module)

    def follow(self, name: str) -> None:
        """Follows a module that is imported: `importlib.reload` of it, and its import after it left `sys.modules`."""
        self._follower.names.add(name)
        if self._follower not in sys.meta_path:
            sys.meta_path.insert(0, self._follower)

    def refuse(self, name: str, error: PatchError) -> None:
        """Lets every later import of a module fail with an error."""
        self._refusals.errors[name] = error
        if self._refusals not in sys.meta_path:
            sys.meta_path.insert(0, self._refusals)

    def end(self) -> None:
        """Ends all refusals, and follows no module any more."""
        self._refusals.errors.clear()
        self._follower.names.clear()
        for finder in (self._refusals, self._follower):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)


class _Refusals:
    """A finder that finds nothing and fails for the modules it was told of."""

    def __init__(self) -> None:
        self.errors: dict[str, PatchError] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.errors:
            raise self.errors[fullname]
        return None


class _Follower:
    """A finder that lets the others find, and is told when the module's code has run."""

    def __init__(self, again: Callable[[str, ModuleType], None]) -> None:
        self.names: set[str] = set()
        self._again = again
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asking: set[str] = vars(self._asking).setdefault("names", set())
        if fullname not in self.names or fullname in asking:
            return None
        asking.add(fullname)
        try:
            spec = self._others(fullname, path, target)
        finally:
            asking.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, lambda module: self._again(fullname, module))  # type: ignore[assignment]
        return spec

    def _others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec
        return None


class _Loader:
    """Runs a module's own loader, which the module and its spec see as theirs, and tells when the code has run."""

    def __init__(self, loader: Any, done: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._done = done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class CallLock:
    """A lock for whole calls: one thread at a time, which may enter it again, and may wait for imports.

    It is a lock of the import system, which knows who waits for whom: an import that waits for a call which waits for
    that import is an error of whoever comes last, not a deadlock.
    """

    def __init__(self) -> None:
        self._lock = _frozen_importlib._ModuleLock("afdpatch's calls")  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except RuntimeError as error:
            raise Conflict(
                "called from within an import that another thread's arm() or apply() waits for",
                expected="armed before that import begins, or after it ended",
                found=str(error),
                todo="import afdpatch earlier",
            ) from error

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def mine(self) -> bool:
        """Whether this thread is in a call."""
        return bool(self._lock.owner == threading.get_ident())

    @property
    def held(self) -> bool:
        """Whether any thread is in a call."""
        return self._lock.owner is not None


def _half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def await_import(name: str) -> None:
    """Waits until no other thread is importing a module, even if it isn't in `sys.modules` yet.

    It returns at once where that thread waits for an import of this one: the module is half imported then. To import it
    would be a deadlock, which Python sees and makes an error of.
    """
    wait = getattr(getattr(importlib, "_bootstrap", None), "_lock_unlock_module", None)
    if wait is not None:
        wait(name)


def imported_module(name: str) -> ModuleType | None:
    """A module that has been imported completely, or None if its import hasn't begun.

    Another thread's import of it is waited for.

    Raises:
        Conflict: this very thread is in the middle of importing it.
    """
    if sys.modules.get(name) is None:
        return None
    await_import(name)
    module = sys.modules.get(name)
    if module is None:  # the import that was waited for has failed
        return None
    if _half_imported(module):
        raise Conflict(
            "the patches are armed from within the import of a module that they patch",
            symbol=name,
            expected="armed before that import begins, or after it ended",
            found=f"{name} is half imported",
            todo="import afdpatch earlier",
        )
    return module
