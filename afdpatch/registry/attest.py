"""Attestation: every process of a server says what is in effect in it, and the server is ready when all say the same.

The roll is a memfd that the server's first process makes and the others reach by a path in the environment: there is no
file to leave behind, and it works for processes that were forked, spawned or come from a fork server. Each process
appends a line of JSON for each kind of process that it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from afdpatch.registry.errors import NotInEffect, PatchError

ENVIRONMENT_KEY = "AFDPATCH_ROLL"
GOOD = ("applied", "checked")
"""States of an entry that a process uses; `pending` and `idle` are fine for entries that it doesn't use."""


def start_method() -> str:
    """How this process came to be: `fork`, `spawn`, `forkserver`, or `exec` if multiprocessing didn't start it."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return "exec"
    method = getattr(process.current_process(), "_start_method", None)
    if method is None:
        method = sys.modules["multiprocessing"].get_start_method(allow_none=True)
    return str(method or "unknown")


@dataclass(frozen=True)
class Attestation:
    """What one process says of itself, as `PatchSet.attest` gives it.

    Attributes:
        role: the role that was applied, or None.
        process: the kind of process that it is (the last one, if it is several).
        processes: every kind of process that it is.
        pid: its number.
        start_method: how it was started: `exec`, `fork`, `spawn`, `forkserver`.
        digest: the digest of its manifest, or None if it has no lock.
        failure: the error that its set failed with, or None.
        states: each entry's state in it.
    """

    role: str | None
    process: str | None
    processes: list[str]
    pid: int
    start_method: str
    digest: str | None
    failure: str | None
    states: Mapping[str, str]

    @classmethod
    def parse(cls, data: object) -> Attestation:
        """Reads what another process wrote.

        Raises:
            ValueError: it isn't that.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"not an attestation: {data!r:.200}")
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.process} (pid {self.pid}, {self.start_method})"


def disagreements(
    attestations: Iterable[Attestation],
    *,
    role: str,
    digest: str,
    expected: Mapping[str, int],
    used: Mapping[str, list[str]],
) -> Iterator[str]:
    """Why a server isn't whole: one line for each process that is missing or differs; nothing if all is well.

    Args:
        attestations: what the processes said.
        role: the server's role.
        digest: the digest of the server's manifest.
        expected: how many processes of each kind there must be.
        used: for each kind of process, the entries that must be in effect in it.
    """
    by_kind: dict[str, dict[int, Attestation]] = {}
    for item in attestations:
        for kind in item.processes or ([item.process] if item.process else ["unknown"]):
            by_kind.setdefault(kind, {})[item.pid] = item
    for kind, count in expected.items():
        found = by_kind.get(kind, {})
        if len(found) < count:
            yield f"{kind}: {len(found)} of {count} processes have attested their patches"
    for kind, found in by_kind.items():
        for item in found.values():
            who = f"{kind} (pid {item.pid}, {item.start_method})"
            if item.failure is not None:
                yield f"{who} failed: {item.failure}"
            if item.role != role:
                yield f"{who} has the role {item.role}, not {role}"
            if item.digest != digest:
                yield f"{who} has the manifest {str(item.digest)[:12]}, not {digest[:12]}"
            for entry in used.get(kind, []):
                state = item.states.get(entry, "absent")
                # An armed entry's module may never be imported in a process.
                if state not in (*GOOD, "pending"):
                    yield f"{who}: patch {entry!r} is {state}"
            for entry, state in item.states.items():
                if state == "lost" and entry not in used.get(kind, []):
                    yield f"{who}: patch {entry!r} is lost"


class Roll:
    """The roll of one server: make it with `create` in its first process, and `from_environment` in the others."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path
        """Where other processes open it, as long as the process that made it lives."""

    @classmethod
    def create(
        cls, name: str, *, role: str, digest: str, expected: Mapping[str, int], used: Mapping[str, list[str]]
    ) -> Roll:
        """Makes a roll; the calling process must outlive the server's others. Arguments: see `disagreements`."""
        fd = os.memfd_create(f"{name}-roll", os.MFD_CLOEXEC)
        roll = cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        roll._append({"role": role, "digest": digest, "expected": dict(expected), "used": dict(used)})
        return roll

    @classmethod
    def open(cls, path: str) -> Roll:
        """Opens the roll at a path.

        Raises:
            NotInEffect: it isn't there: the server's first process has ended.
        """
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        except OSError as error:
            raise NotInEffect(
                "the roll of this server's processes cannot be opened",
                found=f"{path}: {error.strerror}",
                todo="restart the server: its first process, which holds the roll, has ended",
            ) from error

    @classmethod
    def from_environment(cls, key: str = ENVIRONMENT_KEY) -> Roll | None:
        """The roll that the environment names, or None if it names none.

        Raises:
            NotInEffect: as `open`.
        """
        path = os.environ.get(key)
        return cls.open(path) if path else None

    def sign(self, attestation: Mapping[str, Any] | Attestation) -> None:
        """Adds what this process says of itself; the last that a process says counts."""
        self._append(asdict(attestation) if isinstance(attestation, Attestation) else dict(attestation))

    def attestations(self) -> list[Attestation]:
        """The last attestation of each process, in the order of their first.

        Raises:
            PatchError: the roll holds something else.
        """
        return self._read()[1]

    def trouble(self) -> str | None:
        """Why the server isn't ready, as far as its patches are concerned; None if all have attested the same.

        Raises:
            PatchError: the roll holds something else.
        """
        header, items = self._read()
        return "; ".join(disagreements(items, **header)) or None

    def close(self) -> None:
        """Closes it; the memory goes when the last process has done so."""
        os.close(self._fd)

    def _read(self) -> tuple[dict[str, Any], list[Attestation]]:
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        try:
            header, *lines = [json.loads(line) for line in data.splitlines()]
            items = {item.pid: item for item in map(Attestation.parse, lines)}
        except (ValueError, TypeError) as error:
            raise PatchError("the roll of this server's processes is damaged", found=str(error)) from error
        return header, list(items.values())

    def _append(self, data: Mapping[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":")).encode() + b"\n"
        # Opened anew for O_APPEND, with which the kernel writes a line whole, after those of other processes.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.write(fd, line) != len(line):
                raise OSError(f"{self.path}: a line was not written whole")
        finally:
            os.close(fd)
