"""What a status page says at one moment."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from afdpatch.runtime.events import Event


class State(enum.IntEnum):
    """Where a server is in its life."""

    STARTING = 0
    LOADING = 1
    READY = 2
    FAILED = 3
    STOPPED = 4


class PeerState(enum.IntEnum):
    """How an attention rank stands with its FFN servers; NONE: this worker sends no hops itself."""

    NONE = 0
    WAITING = 1
    CONNECTED = 2
    LOST = 3
    GIVEN_UP = 4


class Histogram(NamedTuple):
    """Observations by bucket; ``counts`` has one entry more than ``bounds_s``, for what is above the last bound."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


class Peer(NamedTuple):
    """A connected peer: its rank and process, and when it last said something (CLOCK_MONOTONIC in nanoseconds)."""

    rank: int
    pid: int
    heard_ns: int


@dataclass(frozen=True)
class Snapshot:
    """A page at one moment.

    Bytes are payload bytes; ``heartbeat_ns`` is CLOCK_MONOTONIC, 0 before the first beat; ``queue`` is how many hops
    have arrived and wait; ``wait_s`` is the time in seconds that this side has waited for the other: an attention rank
    for its replies, an FFN server for hops.
    """

    role: str
    rank: int
    state: State
    worker_pid: int
    heartbeat_ns: int
    hops: int
    rows: int
    bytes_a2f: int
    bytes_f2a: int
    steps: int
    last_step_hops: int
    last_step_bytes: int
    peers: int
    peer_state: PeerState
    peers_named: tuple[Peer, ...]
    queue: int
    wait_s: float
    draining: bool
    drain_requested: bool
    events: dict[Event, int]
    weight_bytes: int
    weights_read: int
    weights_skipped: int
    manifest_digest: str
    last_error: str
    hop_times: Histogram
    compute_times: Histogram
    step_times: Histogram

    @property
    def errors(self) -> int:
        """Hops that failed."""
        return self.events[Event.ERROR]

    @property
    def drained(self) -> bool:
        """Whether the server drains and has no peers left."""
        return self.draining and not self.peers

    @property
    def peers_refused(self) -> int:
        """Connections that were refused."""
        return self.events[Event.REFUSED]

    def describe(self, now_s: float) -> dict[str, Any]:
        """What a person asks of a page, as JSON has it; ages in seconds before ``now_s`` (CLOCK_MONOTONIC)."""
        return {
            "role": self.role,
            "rank": self.rank,
            "state": self.state.name.lower(),
            "worker_pid": self.worker_pid,
            "heartbeat_age_s": round(now_s - self.heartbeat_ns / 1e9, 3) if self.heartbeat_ns else None,
            "peers": self.peers,
            "peer_state": self.peer_state.name.lower(),
            "peers_named": [
                {"rank": peer.rank, "pid": peer.pid, "age_s": round(now_s - peer.heard_ns / 1e9, 3)}
                for peer in self.peers_named
            ],
            "queue": self.queue,
            "wait_s": round(self.wait_s, 6),
            "draining": self.draining,
            "drain_requested": self.drain_requested,
            "hops": self.hops,
            "steps": self.steps,
            "events": {event.counter: number for event, number in self.events.items()},
            "manifest_digest": self.manifest_digest,
            "last_error": self.last_error,
        }
