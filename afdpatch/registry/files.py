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
        try:
            with open(self._root / file, "rb") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        found = []
        top = str(self._root)
        for folder, folders, names in os.walk(self._root / self._package):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = os.path.relpath(folder, top).replace(os.sep, "/")
            found += [f"{inside}/{name}" for name in names if name.endswith(".py")]
        return sorted(found)

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        for file in files:
            data = self.read(file)
            if data is not None:
                yield file, data
