"""A package's files in a wheel or in an sdist, read without unpacking it."""

from __future__ import annotations

import posixpath
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import TypeVar

from afdpatch.registry.files import SourceError, leads_back

_LIBRARY = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
"""Where a wheel may keep what an installer puts beside the rest."""

Content = TypeVar("Content")


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
        except Exception as error:  # What damaged bytes lead to is of many types.
            raise SourceError(f"{path} is not a wheel: {error!r}") from error
        members = sorted(self._zip.namelist(), key=lambda name: (_LIBRARY.match(name) is not None, name))
        self._names = {_LIBRARY.sub("", name, count=1): name for name in members}
        if f"{package}/__init__.py" not in self._names:
            raise SourceError(f"{path} doesn't hold the package {package!r}")
        metadata = [name for name in self._names if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
        self.stated = _stated(self._read(metadata[0])) if len(metadata) == 1 else ()

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        return self._read(self._names[file]) if file in self._names else None

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        prefix = f"{self._package}/"
        return sorted(name for name in self._names if name.startswith(prefix) and name.endswith(".py"))

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        for file in files:
            if file in self._names:
                yield file, self._read(self._names[file])

    def _read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except Exception as error:  # as above
            raise SourceError(f"{self.label}: {name} cannot be read: {error!r}") from error


class SdistFiles:
    """The Python files of a package in an sdist (`.tar.gz`), read once from its beginning to its end.

    The package may stand anywhere in it; the folder nearest to the top counts. Links are followed.

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
        links: dict[str, str] = {}
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    name = posixpath.normpath(member.name)
                    if member.islnk():
                        links[name] = posixpath.normpath(member.linkname)
                    elif member.issym():
                        links[name] = link_target(name, member.linkname)
                    elif member.isfile() and name.endswith((".py", "/PKG-INFO")):
                        stream = archive.extractfile(member)
                        members[name] = stream.read() if stream is not None else b""
        except Exception as error:  # What damaged bytes lead to is of many types.
            raise SourceError(f"{path} is not an sdist: {error!r}") from error
        members = follow_links(members, links)
        prefix = package_prefix(package, members)
        if prefix is None:
            raise SourceError(f"{path} doesn't hold the package {package!r}")
        inside = f"{prefix}{package}/"
        self._data = {
            name[len(prefix) :]: data
            for name, data in members.items()
            if name.startswith(inside) and name.endswith(".py")
        }
        info_names = [name for name in members if name.count("/") == 1 and name.endswith("/PKG-INFO")]
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


def link_target(link: str, text: str) -> str:
    """The path that a symbolic link leads to, from where its own path begins."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(link), text))


def follow_links(found: Mapping[str, Content], links: Mapping[str, str]) -> dict[str, Content]:
    """Files, and the same again under each path that links give them.

    Args:
        found: what the files have, by their paths.
        links: where each link leads, to a file or a folder, by the link's path.
    """
    real = {link: _real(target, links) for link, target in links.items()}

    def below(link: str, shown: str, above: tuple[str, ...]) -> Iterator[tuple[str, Content]]:
        place = real[link]
        if leads_back(place, (*above, link)):
            return
        for path, content in found.items():
            if f"{path}/".startswith(f"{place}/"):
                yield shown + path[len(place) :], content
        for inner in real:
            if inner.startswith(f"{place}/"):
                yield from below(inner, shown + inner[len(place) :], (*above, link))

    return {**found, **{path: content for link in real for path, content in below(link, link, ())}}


def _real(path: str, links: Mapping[str, str]) -> str:
    """A path without links in it, as far as they end."""
    for _ in range(40):
        link = next((link for link in links if f"{path}/".startswith(f"{link}/")), None)
        if link is None:
            break
        path = links[link] + path[len(link) :]
    return path


def _stated(metadata: bytes) -> tuple[tuple[str, str], ...]:
    headers = HeaderParser().parsestr(metadata.decode("utf-8", "replace"))
    name, version = headers.get("Name"), headers.get("Version")
    return ((name, version),) if name and version else ()
