"""The errors of the registry: each knows its exit code, its patch and symbol, what was expected and what was found."""

from __future__ import annotations


class PatchError(Exception):
    """A patch, or the set of patches, cannot be used.

    None of these is an `ImportError`: `try: import x / except ImportError` in the patched package must not swallow one.

    Attributes:
        exit_code: the exit code of a command that ends with this error.
        patch_id: the manifest entry's id, if one entry is concerned.
        symbol: the symbol as `module:Qualified.name`, if one is concerned.
        expected: what should have been there.
        found: what was there.
        todo: what the reader can do about it.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        patch_id: str | None = None,
        symbol: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        todo: str | None = None,
    ) -> None:
        parts = [f"patch {patch_id!r}" if patch_id else "", symbol or "", message]
        text = ": ".join(part for part in parts if part)
        for label, value in (("expected", expected), ("found", found), ("to do", todo)):
            if value:
                text += f"; {label}: {value}"
        super().__init__(text)
        self.patch_id = patch_id
        self.symbol = symbol
        self.expected = expected
        self.found = found
        self.todo = todo


class ManifestError(PatchError):
    """The manifest is not valid, or its entry cannot be pinned as it stands. Exit code 2."""

    exit_code = 2


class Unpatchable(ManifestError):
    """What an entry names can't be patched soundly that way; the text says why. Exit code 2."""


class TargetAbsent(PatchError):
    """A target or a relied-on symbol isn't where the manifest says. Exit code 3."""

    exit_code = 3


class TargetDrifted(PatchError):
    """A target or a relied-on symbol differs from what was pinned. Exit code 4."""

    exit_code = 4


class Conflict(PatchError):
    """Somebody else's change, or a second use of ours, is in the way. Exit code 5."""

    exit_code = 5


class LockError(PatchError):
    """The lock cannot be read, or was not made by this version of `afdpatch pin`. Exit code 5."""

    exit_code = 5


class StaleLock(LockError):
    """The manifest was edited after the lock was made. Exit code 5."""


class Obsolete(PatchError):
    """An entry's `remove_when` says that the entry has no reason any more. Exit code 6."""

    exit_code = 6


class NotInEffect(PatchError):
    """A patch that should be in effect isn't. Exit code 7."""

    exit_code = 7


HELD = "the original is held by others, who would go on using it"
"""The message of the one refusal that `verify` finds in source and `apply` by identity, and what else they say."""
HELD_EXPECTED = (
    "no modules that did `from … import` of it but its holders, and no partial, default argument, table, cache, "
    "subclass or bound method of it"
)
HELD_TODO = (
    "add modules of the package to the entry's holders, then `afdpatch pin`; for the rest, let the entry come into "
    "effect earlier (`when: always`), or patch what holds it"
)


class OtherVersion(PatchError):
    """The package's version is not one that a lock was made for. Exit code 8."""

    exit_code = 8
