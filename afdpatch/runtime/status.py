"""The status pages: one server's counters, latencies and heartbeats in shared memory, a page for each worker.

A memfd that the server's first process makes; the others reach it through ``/proc/<pid>/fd/<n>``, whose path travels
in the environment. A page is written by its worker and read by the HTTP processes; one word goes the other way: whether
the server was asked to drain. Numbers are aligned unsigned 64-bit words, each written whole, so that a reader sees an
old or a new value and never half of one; two words may be of different moments. A text has two places and a count of
its writes, which says which one holds; the other one is written next.
"""

from __future__ import annotations

import enum
import fcntl
import math
import mmap
import os
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence

from afdpatch.runtime.config import ROLES
from afdpatch.runtime.events import Event
from afdpatch.runtime.snapshot import Histogram, Peer, PeerState, Snapshot, State

__all__ = ["Histogram", "Peer", "PeerState", "Snapshot", "State", "StatusPage", "StatusPageError", "StatusPages"]

ENVIRONMENT_KEY = "AFDPATCH_STATUS_PAGE"
LAYOUT_VERSION = 2
_MAGIC = int.from_bytes(b"AFDstat1", "little")
_SIZE = 8192
BUCKETS_NS = tuple(step * 10**power for power in range(4, 11) for step in (1, 2, 5))[:19]
"""Upper bounds of the latency buckets in nanoseconds: 10 us, 20 us, 50 us, ... 10 s; one more bucket takes the rest."""
MAX_ERROR_BYTES = 1024
MAX_DIGEST_BYTES = 128
MAX_PEERS = 64
"""How many peers a page names; more are only counted."""


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
    STEPS = 11
    LAST_STEP_HOPS = 12
    LAST_STEP_BYTES = 13
    PEERS = 14
    WEIGHT_BYTES = 16
    WEIGHTS_READ = 17
    WEIGHTS_SKIPPED = 18
    PEER_STATE = 19
    RANK = 20
    WAIT = 21
    QUEUE = 22
    DRAINING = 23
    DRAIN_REQUESTED = 24
    PEERS_NAMED = 25
    ENDS_BY = 26
    EVENTS = 40
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
_WAIT = int(_Word.WAIT)
_QUEUE = int(_Word.QUEUE)
_DRAIN_REQUESTED = int(_Word.DRAIN_REQUESTED)
_DIGEST_AT = 2048
_ERROR_AT = 4096
_PEERS_AT = 6656


def _slot(at: int, writes: int, limit: int) -> int:
    """Where the text of write number ``writes`` lies: its length, then its bytes."""
    return at + 8 + (writes & 1) * (8 + limit)


class StatusPageError(RuntimeError):
    """The page can't be opened, or isn't one."""


class StatusPage:
    """One worker's page; make it with ``create``, ``open`` or ``from_environment``."""

    def __init__(self, fd: int, owner_pid: int, owner_fd: int, index: int = 0) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, 0)
        self._bytes = memoryview(self._map)[index * _SIZE : (index + 1) * _SIZE]
        self._words = self._bytes.cast("Q")
        self._text_lock = threading.Lock()
        self._lock = threading.Lock()
        self._step_start_ns = 0
        self._step_hops = 0
        self._step_bytes = 0
        self.path = f"/proc/{owner_pid}/fd/{owner_fd}"
        """Where other processes of the server open the pages, as long as the process that made them lives."""

    @classmethod
    def create(cls, role: str, manifest_digest: str = "", *, ranks: int = 1, first_rank: int = 0) -> StatusPage:
        """Make the pages of a server of ``role``; the calling process must outlive the server's others.

        Args:
            role: the server's.
            manifest_digest: of its patch set, as hex text.
            ranks: how many workers the server has; each gets a page.
            first_rank: rank of the first one among all workers of its role.

        Returns:
            The first worker's page.

        Raises:
            StatusPageError: unknown role, no ranks, a host that isn't little-endian.
        """
        if role not in ROLES:
            raise StatusPageError(f"status page: role is {role!r}; expected one of {', '.join(ROLES)}")
        if ranks < 1 or first_rank < 0:
            raise StatusPageError(f"status page: found {ranks} ranks from {first_rank}; expected 1 or more, from 0 on")
        if sys.byteorder != "little":
            raise StatusPageError("status page: this host is big-endian; only little-endian hosts are supported")
        fd = os.memfd_create(f"afdpatch-status-{role}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, ranks * _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for index in reversed(range(ranks)):
            page = cls(fd if index == 0 else os.dup(fd), os.getpid(), fd, index)
            page._words[_Word.VERSION] = LAYOUT_VERSION
            page._words[_Word.ROLE] = ROLES.index(role)
            page._words[_Word.RANK] = first_rank + index
            page._words[_Word.MAGIC] = _MAGIC
            if manifest_digest:
                page.set_manifest_digest(manifest_digest)
            if index:
                page.close()
        return page

    @classmethod
    def open(cls, path: str, index: int = 0) -> StatusPage:
        """Map the page of the server's worker ``index``.

        Raises:
            StatusPageError: nothing there, no right to it, not pages of this version, no worker of that index.
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
            if not size or size % _SIZE:
                raise StatusPageError(
                    f"status page: {path}: found {size} bytes, expected a multiple of {_SIZE}; not a status page"
                )
            if not 0 <= index < size // _SIZE:
                raise StatusPageError(
                    f"status page: {path}: found pages for {size // _SIZE} workers, expected one for worker {index}; "
                    f"the server was started for fewer workers"
                )
            page = cls(fd, os.getpid(), fd, index)
        except BaseException:
            os.close(fd)
            raise
        found = page._words[_Word.MAGIC], page._words[_Word.VERSION], page._words[_Word.ROLE]
        if found[:2] != (_MAGIC, LAYOUT_VERSION) or found[2] >= len(ROLES):
            page.close()
            raise StatusPageError(
                f"status page: {path}: found magic {found[0]:#x}, version {found[1]}, role {found[2]}; "
                f"expected magic {_MAGIC:#x}, version {LAYOUT_VERSION}: both processes must run the same afdpatch"
            )
        page.path = path
        return page

    @classmethod
    def from_environment(cls, index: int = 0) -> StatusPage | None:
        """Worker ``index``'s page by ``AFDPATCH_STATUS_PAGE``; None when the variable isn't set (AFD is off)."""
        path = os.environ.get(ENVIRONMENT_KEY)
        return cls.open(path, index) if path else None

    def close(self) -> None:
        """Unmap; the memory goes when the last process has done so."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self._fd)

    def is_at(self, path: str) -> bool:
        """Whether this very memory is at ``path`` now. Raises OSError: nothing is."""
        return os.path.samestat(os.stat(path), os.fstat(self._fd))

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

    def count_wait(self, wait_ns: int) -> None:
        """Count ``wait_ns`` nanoseconds in which an FFN server had nothing to do."""
        self._words[_WAIT] += wait_ns

    def set_queue(self, hops: int) -> None:
        """How many hops have arrived and wait for their turn."""
        self._words[_QUEUE] = hops

    @property
    def peers(self) -> int:
        """Peers connected now."""
        return self._words[_Word.PEERS]

    @property
    def drain_requested(self) -> bool:
        """Whether the server was asked to drain."""
        return self._words[_DRAIN_REQUESTED] != 0

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
        with self._lock:
            if self._words[_Word.STATE] != State.FAILED:
                self._words[_Word.STATE] = int(state)

    def fail(self, text: str) -> None:
        """Keep the error and move to FAILED."""
        self.set_error(text)
        with self._lock:
            self._words[_Word.STATE] = int(State.FAILED)

    def count(self, event: Event, text: str = "", number: int = 1) -> None:
        """Count an event that the server survives, and keep its text as the last error if there is one.

        Any thread of the worker may call it.
        """
        if text:  # first: who sees the number finds its text
            self.set_error(text)
        with self._lock:
            self._words[_Word.EVENTS + event.index] += number

    def set_peer_state(self, state: PeerState) -> None:
        """How this attention rank stands with its FFN servers."""
        self._words[_Word.PEER_STATE] = int(state)

    def set_peers(self, count: int) -> None:
        """How many peers are connected now."""
        self._words[_Word.PEERS] = count

    def name_peers(self, peers: Sequence[Peer]) -> None:
        """Name the connected peers; of more than ``MAX_PEERS`` the first ones."""
        words, at = self._words, _PEERS_AT // 8
        for number, peer in enumerate(peers[:MAX_PEERS]):
            words[at + 2 * number] = peer.rank << 32 | peer.pid
            words[at + 2 * number + 1] = peer.heard_ns
        words[_Word.PEERS_NAMED] = min(len(peers), MAX_PEERS)

    @property
    def ends_by_s(self) -> float:
        """When this server's hops must have ended, on CLOCK_MONOTONIC in seconds; infinite while it isn't to end."""
        return self._words[_Word.ENDS_BY] / 1e9 or math.inf

    def request_end(self, by_s: float) -> None:
        """This page's server is to end: its hops must have ended by then (CLOCK_MONOTONIC, seconds)."""
        self._words[_Word.ENDS_BY] = int(by_s * 1e9)

    def set_draining(self, draining: bool) -> None:
        """Whether this FFN server turns its peers away."""
        self._words[_Word.DRAINING] = int(draining)

    def request_drain(self, wanted: bool) -> None:
        """Ask this page's worker to drain, or to take peers again; any process of the server may."""
        self._words[_DRAIN_REQUESTED] = int(wanted)

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
            self._bytes[slot + 8 : slot + 8 + len(data)] = data
            self._words[at // 8] = writes

    def _read_text(self, at: int, limit: int) -> str:
        data = b""
        for _ in range(1000):
            writes = self._words[at // 8]
            slot = _slot(at, writes, limit)
            data = bytes(self._bytes[slot + 8 : slot + 8 + min(self._words[slot // 8], limit)])
            if self._words[at // 8] == writes:
                break
        return data.decode("utf-8", "ignore")

    def _read_times(self, base: int) -> Histogram:
        counts = tuple(self._words[base + 1 : base + 2 + len(BUCKETS_NS)])
        return Histogram(tuple(bound / 1e9 for bound in BUCKETS_NS), counts, self._words[base] / 1e9)

    def _read_peers(self) -> tuple[Peer, ...]:
        at = _PEERS_AT // 8
        named = min(self._words[_Word.PEERS_NAMED], MAX_PEERS)
        pairs = (self._words[at + 2 * number : at + 2 * number + 2] for number in range(named))
        return tuple(Peer(who >> 32, who & 0xFFFFFFFF, heard_ns) for who, heard_ns in pairs)

    def snapshot(self) -> Snapshot:
        """Read everything."""
        words = self._words
        role = ROLES[words[_Word.ROLE]]
        hop_times = self._read_times(_HOP_TIMES)
        return Snapshot(
            role=role,
            rank=words[_Word.RANK],
            state=State(min(words[_Word.STATE], State.STOPPED)),
            worker_pid=words[_Word.WORKER_PID],
            heartbeat_ns=words[_HEARTBEAT],
            hops=words[_HOPS],
            rows=words[_ROWS],
            bytes_a2f=words[_A2F],
            bytes_f2a=words[_F2A],
            steps=words[_Word.STEPS],
            last_step_hops=words[_Word.LAST_STEP_HOPS],
            last_step_bytes=words[_Word.LAST_STEP_BYTES],
            peers=words[_Word.PEERS],
            peer_state=PeerState(min(words[_Word.PEER_STATE], PeerState.GIVEN_UP)),
            peers_named=self._read_peers(),
            queue=words[_QUEUE],
            wait_s=hop_times.sum_s if role == "attention" else words[_WAIT] / 1e9,
            draining=words[_Word.DRAINING] != 0,
            drain_requested=self.drain_requested,
            events={event: words[_Word.EVENTS + event.index] for event in Event},
            weight_bytes=words[_Word.WEIGHT_BYTES],
            weights_read=words[_Word.WEIGHTS_READ],
            weights_skipped=words[_Word.WEIGHTS_SKIPPED],
            manifest_digest=self._read_text(_DIGEST_AT, MAX_DIGEST_BYTES),
            last_error=self._read_text(_ERROR_AT, MAX_ERROR_BYTES),
            hop_times=hop_times,
            compute_times=self._read_times(_COMPUTE_TIMES),
            step_times=self._read_times(_STEP_TIMES),
        )


class StatusPages:
    """All pages of a server, for those who read them.

    Args:
        path: of any page of the server.
    """

    def __init__(self, path: str) -> None:
        first = StatusPage.open(path)
        workers = os.fstat(first._fd).st_size // _SIZE
        self.pages = (first, *(StatusPage.open(path, index) for index in range(1, workers)))

    @classmethod
    def from_environment(cls) -> StatusPages | None:
        """The pages named by ``AFDPATCH_STATUS_PAGE``; None when the variable isn't set (AFD is off)."""
        path = os.environ.get(ENVIRONMENT_KEY)
        return cls(path) if path else None

    def snapshots(self) -> list[Snapshot]:
        """Read everything, ordered by rank."""
        return [page.snapshot() for page in self.pages]

    def request_drain(self, wanted: bool) -> None:
        """Ask every worker to drain, or to take peers again."""
        for page in self.pages:
            page.request_drain(wanted)

    def request_end(self, by_s: float) -> None:
        """The server is to end: all its hops must have ended by then (CLOCK_MONOTONIC, seconds)."""
        for page in self.pages:
            page.request_end(by_s)

    def close(self) -> None:
        """Unmap all."""
        for page in self.pages:
            page.close()
