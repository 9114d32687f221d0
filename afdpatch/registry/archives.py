"""A package's files in a wheel or in an sdist, read without unpacking it."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

from afdpatch.registry.files import SourceError


class WheelFiles:
    """The files of a package in a wheel. A member whose checksum is wrong is an error.

    Args:
        package: the package's name.
        path: the wheel.

    Raises:
        SourceError: it is no wheel, or doesn't hold the package.
    """

    commit: str | None = None

    def __init__(self, package: str, path: Path) -> None:
        self.label = str(path)
        self._package = package
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise SourceError(f"{path} is not a wheel: {error}") from error
        self._names = set(self._zip.namelist())
        if f"{package}/__init__.py" not in self._names:
            raise SourceError(f"{path} doesn't hold the package {package!r}")
        metadata = [name for name in self._names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
        self.stated = _stated(self._read(metadata[0])) if len(metadata) == 1 else ()

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        return self._read(file) if file in self._names else None

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        prefix = f"{self._package}/"
        return sorted(name for name in self._names if name.startswith(prefix) and name.endswith(".py"))

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        for file in files:
            if file in self._names:
                yield file, self._read(file)

    def _read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise SourceError(f"{self.label}: {name} cannot be read: {error}") from error


class SdistFiles:
    """The Python files of a package in an sdist (`.tar.gz`), read once from its beginning to its end.

    The package may stand anywhere in it; the folder nearest to the top counts.

    Args:
        package: the package's name.
        path: the archive.

    Raises:
        SourceError: it is no such archive, or doesn't hold the package.
    """

    commit: str | None = None

    def __init__(self, package: str, path: Path) -> None:
        self.label = str(path)
        self._package = package
        members: dict[str, bytes] = {}
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    info = name.count("/") == 1 and name.endswith("/PKG-INFO")
                    if member.isfile() and (info or (name.endswith(".py") and f"/{package}/" in f"/{name}")):
                        stream = archive.extractfile(member)
                        members[name] = stream.read() if stream is not None else b""
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{path} is not an sdist: {error}") from error
        prefix = package_prefix(package, members)
        if prefix is None:
            raise SourceError(f"{path} doesn't hold the package {package!r}")
        inside = f"{prefix}{package}/"
        self._data = {name[len(prefix) :]: data for name, data in members.items() if name.startswith(inside)}
        info_names = [name for name in members if name.endswith("/PKG-INFO")]
        self.stated = _stated(members[info_names[0]]) if len(info_names) == 1 else ()

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        return self._data.get(file)

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        return sorted(self._data)

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        return ((file, self._data[file]) for file in files if file in self._data)


def package_prefix(package: str, names: Iterable[str]) -> str | None:
    """What stands before the package's folder in the paths of an archive or a repository; None if it isn't there."""
    init = f"{package}/__init__.py"
    found = [name[: -len(init)] for name in names if name == init or name.endswith(f"/{init}")]
    return min(found, key=lambda prefix: (prefix.count("/"), prefix), default=None)


def _stated(metadata: bytes) -> tuple[tuple[str, str], ...]:
    headers = HeaderParser().parsestr(metadata.decode("utf-8", "replace"))
    name, version = headers.get("Name"), headers.get("Version")
    return ((name, version),) if name and version else ()
