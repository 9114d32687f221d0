"""What an entry is in a process, and how a failure is kept."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import TracebackType

from afdpatch.registry.errors import PatchError


class State(str, Enum):
    """What an entry is in this process."""

    IDLE = "idle"
    """Not armed, or not used by the role and kind of this process so far."""

    PENDING = "pending"
    """Armed; put in effect as soon as its target's module is imported."""

    APPLIED = "applied"
    """In effect: every slot holds our object, read back now."""

    LOST = "lost"
    """It was in effect, and a slot holds another object now; or its module was imported past its hook."""

    CHECKED = "checked"
    """`official`: nothing is patched; its target was found as pinned."""


class Sticky:
    """Keeps the `PatchError` that leaves its block, and makes one of any other exception."""

    def __init__(self, fail: Callable[[PatchError], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, PatchError):
            self._fail(error)
        elif isinstance(error, Exception):
            wrapped = PatchError("the set could not be put in effect", found=f"{type(error).__name__}: {error}")
            self._fail(wrapped)
            raise wrapped from error
