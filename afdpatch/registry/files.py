"""Where a package's files come from: what a source tree asks of it, and the plain directory.

Archives and git are in `archives` and `gitfiles`; only the directory is on the run path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol


class SourceError(OSError):
    """A source cannot be opened or read; the text says which and why. Exit code 2 of the commands."""


class Files(Protocol):
    """A package's files, named by their paths from the directory that holds the package, with slashes.

    Attributes:
        label: what to call the source in reports.
        commit: the commit that the files are of, if the source knows it (git does).
        stated: what the source's own metadata says: pairs of a distribution's name and its version.
    """

    label: str
    commit: str | None
    stated: tuple[tuple[str, str], ...]

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes, in any order; a file that isn't there is left out."""


def leads_back(place: str, above: Iterable[str]) -> bool:
    """Whether a folder lies on the way to itself, or holds one that does: a link to it makes paths without end."""
    return any(f"{one}/".startswith(f"{place}/") for one in above)


class DirectoryFiles:
    """The files of a package in a directory.

    Args:
        package: the package's name.
        root: the directory that holds the package's folder.
    """

    commit: str | None = None
    stated: tuple[tuple[str, str], ...] = ()

    def __init__(self, package: str, root: Path) -> None:
        self.label = str(root)
        self._package = package
        self._root = root

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        path = os.path.join(self._root, file)
        if not os.path.isfile(path):  # A pipe has no end, a link may lead to itself.
            return None
        with open(path, "rb") as stream:
            return stream.read()

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        top = os.path.join(self._root, self._package)
        return sorted(self._below(top, self._package, (os.path.realpath(top),)))

    def _below(self, folder: str, inside: str, above: tuple[str, ...]) -> Iterator[str]:
        """A folder's files and those of its folders, links followed; `above` is where the folders on the way lie."""
        try:
            items = list(os.scandir(folder))
        except PermissionError:
            return  # nor can Python import anything from there
        for item in items:
            if item.name.endswith(".py") and (item.is_file(follow_symlinks=False) or os.path.isfile(item.path)):
                yield f"{inside}/{item.name}"
            elif item.name != "__pycache__" and (item.is_dir(follow_symlinks=False) or os.path.isdir(item.path)):
                place = os.path.realpath(item.path) if item.is_symlink() else f"{above[-1]}/{item.name}"
                if not leads_back(place, above):
                    yield from self._below(item.path, f"{inside}/{item.name}", (*above, place))

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        for file in files:
            data = self.read(file)
            if data is not None:
                yield file, data
