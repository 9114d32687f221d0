"""Links to a package's source at the pinned commit, on the forge that the manifest names."""

from __future__ import annotations

from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Manifest
from afdpatch.registry.source import SourceTree


def permalink(manifest: Manifest, file: str, line: int | None = None) -> str | None:
    """A file at the manifest's commit; None without a repository.

    Args:
        manifest: its `repository` is a forge with addresses of the form `…/blob/COMMIT/FILE#L1`.
        file: from the repository's root.
        line: the line there, if it is known.
    """
    if manifest.repository is None:
        return None
    return f"{manifest.repository}/blob/{manifest.commit}/{file}" + (f"#L{line}" if line else "")


def pinned_link(lock: Lock, symbol: str) -> str | None:
    """A symbol at the commit that it was pinned at: its line there, whatever the source at hand has."""
    pinned = lock.symbols.get(symbol)
    return None if pinned is None else permalink(lock.manifest, pinned.file, pinned.line)


def link_here(lock: Lock, tree: SourceTree, file: str, line: int, *, same_release: bool) -> str | None:
    """A place of the source at hand, at the pinned commit.

    The line goes into the link only where it is the commit's too: the file's hash is the pinned one or, for a file
    that isn't pinned, the source at hand is the pinned release.
    """
    pinned = lock.files.get(file)
    same = same_release if pinned is None else tree.sha256(file) == pinned
    return permalink(lock.manifest, file, line if same else None)
