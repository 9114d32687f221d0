"""The dry run: what putting entries in effect would do, found without importing, making or changing anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from afdpatch.registry.build import find
from afdpatch.registry.errors import PatchError
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceTree
from afdpatch.registry.verify import check_entry


@dataclass(frozen=True)
class Step:
    """What would be done for one entry.

    Attributes:
        entry: the entry.
        state: its state now (`State`'s value).
        action: `none` (it is in effect), `check` (`official`), `install`; `wrap` or `replace`, now, since its module is
            imported; `import` (by `apply`, and then the same); `wait` (by `arm`, for the module's import).
        rebinds: the names, as `module.name`, that would hold ours: the target's, and those of imported holders.
        error: what would fail, as far as it can be seen now.
    """

    entry: Entry
    state: str
    action: str
    rebinds: tuple[str, ...] = ()
    error: PatchError | None = None

    def __str__(self) -> str:
        text = f"{self.entry.id}: {self.action} {self.entry.target}"
        if len(self.rebinds) > 1:
            text += f", and {', '.join(self.rebinds[1:])}"
        return f"{text}: would fail: {self.error}" if self.error else text


def plan(entries: Iterable[Entry], lock: Lock, states: Mapping[str, str]) -> tuple[Step, ...]:
    """The steps of some entries, in their order.

    Args:
        entries: what would be put in effect.
        lock: what they are pinned to.
        states: each entry's state now.
    """
    tree = SourceTree.installed(lock.manifest.package)
    return tuple(_step(entry, lock, tree, states[entry.id]) for entry in entries)


def _step(entry: Entry, lock: Lock, tree: SourceTree, state: str) -> Step:
    if state in ("applied", "checked"):
        return Step(entry, state, "none")
    findings, here = check_entry(entry, lock, tree, trust_hashes=True)
    module = sys.modules.get(entry.module)
    action, rebinds, error = _action(entry, module), [f"{entry.module}.{entry.qualname}"], None
    try:
        for finding in findings:
            raise finding.as_error(entry.id)
        if entry.patches_target and module is not None:
            target = find(entry, module, here[entry.target], tree)
            for holder in entry.holders:
                names = vars(sys.modules.get(holder, object))
                rebinds += [f"{holder}.{name}" for name, value in names.items() if value is target.original]
    except PatchError as found:
        error = found
    return Step(entry, state, action, tuple(rebinds) if entry.patches_target else (), error)


def _action(entry: Entry, module: ModuleType | None) -> str:
    if entry.kind == "official":
        return "check"
    if entry.kind == "install" and (entry.when == "role" or module is not None):
        return "install"
    if module is not None:
        return entry.kind
    return "wait" if entry.when == "always" else "import"
