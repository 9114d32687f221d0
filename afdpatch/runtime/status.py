"""The status page: one server's counters, latencies and heartbeat in shared memory.

A memfd that the server's first process makes; the others reach it through ``/proc/<pid>/fd/<n>``, whose path travels in
the environment. Written by one worker, read by the HTTP processes. Numbers are aligned unsigned 64-bit words, each
written whole, so that a reader sees an old or a new value and never half of one; two words may be of different moments.
A text has two places and a count of its writes, which says which one holds; the other one is written next.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import sys
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

ENVIRONMENT_KEY = "AFDPATCH_STATUS_PAGE"
LAYOUT_VERSION = 1
_MAGIC = int.from_bytes(b"AFDstat1", "little")
_SIZE = 8192
BUCKETS_NS = tuple(step * 10**power for power in range(4, 11) for step in (1, 2, 5))[:19]
"""Upper bounds of the latency buckets in nanoseconds: 10 us, 20 us, 50 us, ... 10 s; one more bucket takes the rest."""
MAX_ERROR_BYTES = 1024
MAX_DIGEST_BYTES = 128
_ROLES = ("attention", "ffn")


class State(enum.IntEnum):
    """Where a server is in its life."""

    STARTING = 0
    LOADING = 1
    READY = 2
    FAILED = 3
    STOPPED = 4


class _Word(enum.IntEnum):
    """Index of each 64-bit word."""

    MAGIC = 0
    VERSION = 1
    ROLE = 2
    STATE = 3
    WORKER_PID = 4
    HEARTBEAT = 5
    HOPS = 6
    ROWS = 7
    BYTES_A2F = 8
    BYTES_F2A = 9
    ERRORS = 10
    STEPS = 11
    LAST_STEP_HOPS = 12
    LAST_STEP_BYTES = 13
    PEERS = 14
    PEERS_REFUSED = 15
    WEIGHT_BYTES = 16
    WEIGHTS_READ = 17
    WEIGHTS_SKIPPED = 18
    HOP_TIMES = 64
    COMPUTE_TIMES = 96
    STEP_TIMES = 128


# Plain ints: an IntEnum member costs a look-up and a slower index on the hop path.
_HEARTBEAT = int(_Word.HEARTBEAT)
_HOPS = int(_Word.HOPS)
_ROWS = int(_Word.ROWS)
_A2F = int(_Word.BYTES_A2F)
_F2A = int(_Word.BYTES_F2A)
_HOP_TIMES = int(_Word.HOP_TIMES)
_COMPUTE_TIMES = int(_Word.COMPUTE_TIMES)
_STEP_TIMES = int(_Word.STEP_TIMES)
_DIGEST_AT = 2048
_ERROR_AT = 4096


def _slot(at: int, writes: int, limit: int) -> int:
    """Where the text of write number ``writes`` lies: its length, then its bytes."""
    return at + 8 + (writes & 1) * (8 + limit)


class StatusPageError(RuntimeError):
    """The page can't be opened, or isn't one."""


class Histogram(NamedTuple):
    """Observations by bucket; ``counts`` has one entry more than ``bounds_s``, for what is above the last bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True)
class Snapshot:
    """The page at one moment. Bytes are payload bytes; ``heartbeat_ns`` is CLOCK_MONOTONIC, 0 before the first beat."""

    role: str
    state: State
    worker_pid: int
    heartbeat_ns: int
    hops: int
    rows: int
    bytes_a2f: int
    bytes_f2a: int
    errors: int
    steps: int
    last_step_hops: int
    last_step_bytes: int
    peers: int
    peers_refused: int
    weight_bytes: int
    weights_read: int
    weights_skipped: int
    manifest_digest: str
    last_error: str
    hop_times: Histogram
    compute_times: Histogram
    step_times: Histogram


class StatusPage:
    """One mapping of the page; make it with ``create``, ``open`` or ``from_environment``."""

    def __init__(self, fd: int, owner_pid: int, owner_fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._text_lock = threading.Lock()
        self._step_start_ns = 0
        self._step_hops = 0
        self._step_bytes = 0
        self.path = f"/proc/{owner_pid}/fd/{owner_fd}"
        """Where other processes of the server open the page, as long as the process that made it lives."""

    @classmethod
    def create(cls, role: str, manifest_digest: str = "") -> StatusPage:
        """Make a page for a server of ``role``; the calling process must outlive the server's others.

        Raises:
            StatusPageError: unknown role, a host that isn't little-endian.
        """
        if role not in _ROLES:
            raise StatusPageError(f"status page: role is {role!r}; expected one of {', '.join(_ROLES)}")
        if sys.byteorder != "little":
            raise StatusPageError("status page: this host is big-endian; only little-endian hosts are supported")
        fd = os.memfd_create(f"afdpatch-status-{role}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        page = cls(fd, os.getpid(), fd)
        page._words[_Word.VERSION] = LAYOUT_VERSION
        page._words[_Word.ROLE] = _ROLES.index(role)
        page._words[_Word.MAGIC] = _MAGIC
        if manifest_digest:
            page.set_manifest_digest(manifest_digest)
        return page

    @classmethod
    def open(cls, path: str) -> StatusPage:
        """Map the page at ``path``.

        Raises:
            StatusPageError: nothing there, no right to it, or not a page of this version.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StatusPageError(
                f"status page: {path}: {error.strerror}; the server's first process, which holds the page, has ended "
                f"or belongs to another user: restart the server"
            ) from error
        try:
            size = os.fstat(fd).st_size
            if size != _SIZE:
                raise StatusPageError(f"status page: {path}: found {size} bytes, expected {_SIZE}; not a status page")
            page = cls(fd, os.getpid(), fd)
        except BaseException:
            os.close(fd)
            raise
        found = page._words[_Word.MAGIC], page._words[_Word.VERSION], page._words[_Word.ROLE]
        if found[:2] != (_MAGIC, LAYOUT_VERSION) or found[2] >= len(_ROLES):
            page.close()
            raise StatusPageError(
                f"status page: {path}: found magic {found[0]:#x}, version {found[1]}, role {found[2]}; "
                f"expected magic {_MAGIC:#x}, version {LAYOUT_VERSION}: both processes must run the same afdpatch"
            )
        page.path = path
        return page

    @classmethod
    def from_environment(cls) -> StatusPage | None:
        """The page named by ``AFDPATCH_STATUS_PAGE``; None when the variable isn't set (AFD is off)."""
        path = os.environ.get(ENVIRONMENT_KEY)
        return cls.open(path) if path else None

    def close(self) -> None:
        """Unmap; the memory goes when the last process has done so."""
        self._words.release()
        self._map.close()
        os.close(self._fd)

    # Hop path: each about a microsecond or less.

    def beat(self) -> None:
        """Say that the worker lives, now."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def count_hop(self, rows: int, nbytes: int, hop_ns: int) -> None:
        """Count a finished hop: ``nbytes`` went each way; it took ``hop_ns`` nanoseconds as this side saw it."""
        words = self._words
        words[_HOPS] += 1
        words[_ROWS] += rows
        words[_A2F] += nbytes
        words[_F2A] += nbytes
        words[_HEARTBEAT] = time.monotonic_ns()
        self._observe(_HOP_TIMES, hop_ns)

    def count_hops(self, hops: int, rows: int, nbytes: int) -> None:
        """Count the hops of a step that no host times: ``rows`` rows and ``nbytes`` bytes each way in each of them."""
        words = self._words
        words[_HOPS] += hops
        words[_ROWS] += hops * rows
        words[_A2F] += hops * nbytes
        words[_F2A] += hops * nbytes
        words[_HEARTBEAT] = time.monotonic_ns()

    def count_compute(self, compute_ns: int) -> None:
        """Count one FFN computation of ``compute_ns`` nanoseconds."""
        self._observe(_COMPUTE_TIMES, compute_ns)

    def begin_step(self) -> None:
        """A forward of the model begins; the hops until ``end_step`` are its hops."""
        words = self._words
        self._step_hops = words[_HOPS]
        self._step_bytes = words[_A2F] + words[_F2A]
        self._step_start_ns = time.monotonic_ns()

    def end_step(self) -> None:
        """The forward that ``begin_step`` began has ended: count it, its hops, its bytes (both ways) and its time."""
        words = self._words
        self._observe(_STEP_TIMES, time.monotonic_ns() - self._step_start_ns)
        words[_Word.LAST_STEP_HOPS] = words[_HOPS] - self._step_hops
        words[_Word.LAST_STEP_BYTES] = words[_A2F] + words[_F2A] - self._step_bytes
        words[_Word.STEPS] += 1

    def _observe(self, base: int, nanoseconds: int) -> None:
        words = self._words
        words[base] += max(nanoseconds, 0)
        words[base + 1 + bisect_left(BUCKETS_NS, nanoseconds)] += 1

    # Rare events.

    def set_worker(self, pid: int | None = None) -> None:
        """Name the worker that writes from now on (default: this process)."""
        self._words[_Word.WORKER_PID] = os.getpid() if pid is None else pid

    def set_state(self, state: State) -> None:
        """Move to ``state``; FAILED is final, since nothing that happens afterwards repairs it."""
        if self._words[_Word.STATE] != State.FAILED:
            self._words[_Word.STATE] = int(state)

    def fail(self, text: str) -> None:
        """Keep the error and move to FAILED."""
        self.set_error(text)
        self._words[_Word.STATE] = int(State.FAILED)

    def count_error(self, text: str) -> None:
        """Count an error that the server survives, and keep its text."""
        self._words[_Word.ERRORS] += 1
        self.set_error(text)

    def count_refused(self, text: str = "") -> None:
        """Count a connection that was refused, and keep the reason if there is one."""
        self._words[_Word.PEERS_REFUSED] += 1
        if text:
            self.set_error(text)

    def set_peers(self, count: int) -> None:
        """How many peers are connected now."""
        self._words[_Word.PEERS] = count

    def count_step(self) -> None:
        """Count a step without timing it (the FFN side sees only its hops)."""
        self._words[_Word.STEPS] += 1

    def set_weights(self, nbytes: int, read: int, skipped: int) -> None:
        """What loading took: bytes of own weights, tensors read from the files, tensors left there."""
        self._words[_Word.WEIGHT_BYTES] = nbytes
        self._words[_Word.WEIGHTS_READ] = read
        self._words[_Word.WEIGHTS_SKIPPED] = skipped

    def set_manifest_digest(self, digest: str) -> None:
        """Keep the digest of the patch set, as hex text (at most 128 characters)."""
        self._write_text(_DIGEST_AT, digest, MAX_DIGEST_BYTES)

    def set_error(self, text: str) -> None:
        """Keep the text of the last error (its first KiB)."""
        self._write_text(_ERROR_AT, text, MAX_ERROR_BYTES)

    def _write_text(self, at: int, text: str, limit: int) -> None:
        data = text.encode("utf-8", "replace")[:limit]
        with self._text_lock:
            writes = self._words[at // 8] + 1
            slot = _slot(at, writes, limit)
            self._words[slot // 8] = len(data)
            self._map[slot + 8 : slot + 8 + len(data)] = data
            self._words[at // 8] = writes

    def _read_text(self, at: int, limit: int) -> str:
        data = b""
        for _ in range(1000):
            writes = self._words[at // 8]
            slot = _slot(at, writes, limit)
            data = self._map[slot + 8 : slot + 8 + min(self._words[slot // 8], limit)]
            if self._words[at // 8] == writes:
                break
        return data.decode("utf-8", "ignore")

    def _read_times(self, base: int) -> Histogram:
        counts = tuple(self._words[base + 1 : base + 2 + len(BUCKETS_NS)])
        return Histogram(tuple(bound / 1e9 for bound in BUCKETS_NS), counts, self._words[base] / 1e9)

    def snapshot(self) -> Snapshot:
        """Read everything."""
        words = self._words
        return Snapshot(
            role=_ROLES[words[_Word.ROLE]],
            state=State(min(words[_Word.STATE], State.STOPPED)),
            worker_pid=words[_Word.WORKER_PID],
            heartbeat_ns=words[_HEARTBEAT],
            hops=words[_HOPS],
            rows=words[_ROWS],
            bytes_a2f=words[_A2F],
            bytes_f2a=words[_F2A],
            errors=words[_Word.ERRORS],
            steps=words[_Word.STEPS],
            last_step_hops=words[_Word.LAST_STEP_HOPS],
            last_step_bytes=words[_Word.LAST_STEP_BYTES],
            peers=words[_Word.PEERS],
            peers_refused=words[_Word.PEERS_REFUSED],
            weight_bytes=words[_Word.WEIGHT_BYTES],
            weights_read=words[_Word.WEIGHTS_READ],
            weights_skipped=words[_Word.WEIGHTS_SKIPPED],
            manifest_digest=self._read_text(_DIGEST_AT, MAX_DIGEST_BYTES),
            last_error=self._read_text(_ERROR_AT, MAX_ERROR_BYTES),
            hop_times=self._read_times(_HOP_TIMES),
            compute_times=self._read_times(_COMPUTE_TIMES),
            step_times=self._read_times(_STEP_TIMES),
        )
