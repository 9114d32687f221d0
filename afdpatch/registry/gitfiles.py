"""A package's files in a git commit, read from the object store: nothing is checked out, a bare repository will do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from afdpatch.registry.archives import follow_links, link_target, package_prefix
from afdpatch.registry.files import SourceError

CHUNK = 500
"""How many objects are asked for before the answers are read: few enough that neither pipe fills up."""


LINK = "120000"
"""The mode of a symbolic link."""


class GitRepository:
    """A git repository, bare or not, and one `git cat-file --batch` that answers for all its objects.

    Args:
        directory: the repository, or a folder in its working tree.

    Raises:
        SourceError: git is missing, or there is no repository.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader: subprocess.Popen[bytes] | None = None
        self.run("rev-parse", "--git-dir")

    def run(self, *arguments: str) -> str:
        """A git command's output.

        Raises:
            SourceError: it failed.
        """
        command = ["git", "-C", str(self.directory), *arguments]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environment()
            )
        except OSError as error:
            raise SourceError(f"git cannot be run: {error}") from error
        if done.returncode:
            message = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
            raise SourceError(f"{self.directory}: git {arguments[0]}: {message}")
        return done.stdout.decode("utf-8", "surrogateescape")

    def commit(self, revision: str) -> str:
        """The full name of the commit that a revision names.

        Raises:
            SourceError: it names none.
        """
        if revision.startswith("-"):
            raise SourceError(f"{self.directory}: {revision!r} is not a revision")
        try:
            return self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
        except SourceError as error:
            raise SourceError(
                f"{self.directory} has no commit {revision!r}; `git fetch` it, or name another"
            ) from error

    def listing(self, commit: str) -> tuple[dict[str, str], dict[str, str]]:
        """The blob of every plain file of a commit, and where each symbolic link leads, by their paths."""
        files: dict[str, str] = {}
        links: dict[str, str] = {}
        for line in self.run("ls-tree", "-r", "-z", "--full-tree", commit).split("\0"):
            meta, _, path = line.partition("\t")
            if meta.startswith("100"):
                files[path] = meta.split()[2]
            elif meta.startswith(LINK):
                links[path] = meta.split()[2]
        texts = (data.decode("utf-8", "surrogateescape") for _, data in self.read(links.values()))
        return files, {link: link_target(link, text) for link, text in zip(links, texts, strict=True)}

    def read(self, blobs: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The blobs' bytes, in the order asked for."""
        wanted = list(blobs)
        for start in range(0, len(wanted), CHUNK):
            yield from self._batch(wanted[start : start + CHUNK])

    def close(self) -> None:
        """Ends the reading process."""
        reader, self._reader = self._reader, None
        if reader is not None and reader.stdin is not None and reader.stdout is not None:
            with suppress(OSError):
                reader.stdin.close()
            reader.stdout.close()
            reader.wait()

    def __del__(self) -> None:
        self.close()

    def _batch(self, blobs: list[str]) -> Iterator[tuple[str, bytes]]:
        if self._reader is None:
            command = ["git", "-C", str(self.directory), "cat-file", "--batch"]
            pipe = subprocess.PIPE
            self._reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment())
        stdin, stdout = self._reader.stdin, self._reader.stdout
        if stdin is None or stdout is None:
            raise SourceError(f"{self.directory}: git cat-file has no pipes")
        stdin.write("".join(f"{blob}\n" for blob in blobs).encode("ascii"))
        stdin.flush()
        answers = []
        for blob in blobs:
            head = stdout.readline().split()
            if len(head) != 3:
                raise SourceError(f"{self.directory}: no object {blob} (a shallow or partial clone?)")
            answers.append((blob, stdout.read(int(head[2]))))
            stdout.read(1)
        yield from answers


def _environment() -> dict[str, str]:
    """The environment for git, without what a hook or a caller's git sets to point to another repository."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


class GitFiles:
    """The files of a package in one commit.

    Args:
        package: the package's name.
        repository: where the commit is.
        commit: the commit's full name.

    Attributes:
        blobs: the blob of each of the package's Python files, those that links lead to among them.
        prefix: what stands before the package's folder in the repository's paths.
        linked: whether there are links in the package, or on the way to it.

    Raises:
        SourceError: the commit doesn't hold the package.
    """

    stated: tuple[tuple[str, str], ...] = ()

    def __init__(self, package: str, repository: GitRepository, commit: str) -> None:
        self.commit: str | None = commit
        self.label = f"git:{repository.directory}@{commit[:12]}"
        self._repository = repository
        files, links = repository.listing(commit)
        everything = follow_links(files, links)
        prefix = package_prefix(package, everything)
        if prefix is None:
            raise SourceError(f"{self.label} doesn't hold the package {package!r}")
        self.prefix = prefix
        inside = f"{prefix}{package}/"
        self.linked = any(link.startswith(inside) or inside.startswith(f"{link}/") for link in links)
        self.blobs = {
            path[len(prefix) :]: blob
            for path, blob in everything.items()
            if path.startswith(inside) and path.endswith(".py")
        }

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        blob = self.blobs.get(file)
        return None if blob is None else next(self._repository.read([blob]))[1]

    def python_files(self) -> list[str]:
        """The package's files that end with `.py`, sorted."""
        return sorted(self.blobs)

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        present = [file for file in files if file in self.blobs]
        for file, (_, data) in zip(present, self._repository.read(self.blobs[file] for file in present), strict=True):
            yield file, data
