"""The status page in Prometheus form, and the judgement of health."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from afdpatch.runtime.events import Event
from afdpatch.runtime.snapshot import Histogram, PeerState, Snapshot, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of what ``render`` gives."""


class _PageCollector(Collector):
    def __init__(self, pages: Sequence[Snapshot], now_s: float) -> None:
        self._pages = pages
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for page in self._pages:
                counter.add_metric(_who(page), count(page))
            yield counter
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for page in self._pages:
                gauge.add_metric(_who(page), value(page))
            yield gauge
        for name, text, times in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=_LABELS)
            for page in self._pages:
                histogram.add_metric(_who(page), *_cumulated(times(page)))
            yield histogram
        yield self._payload()
        yield from self._ages()
        yield _one_of(
            "afd_state", "1 for the state that the worker is in.", State, self._pages, lambda page: page.state
        )
        text = "1 for how the worker stands with its FFN servers; none: it sends no hops."
        yield _one_of("afd_peer_state", text, PeerState, self._pages, lambda page: page.peer_state)
        tensors = GaugeMetricFamily("afd_weight_tensors", "Tensors of the checkpoint.", labels=[*_LABELS, "taken"])
        info = GaugeMetricFamily("afd_build_info", "The patch set in effect.", labels=[*_LABELS, "manifest_digest"])
        for page in self._pages:
            tensors.add_metric([*_who(page), "read"], page.weights_read)
            tensors.add_metric([*_who(page), "skipped"], page.weights_skipped)
            info.add_metric([*_who(page), page.manifest_digest], 1)
        yield tensors
        yield info

    def _payload(self) -> Metric:
        payload = CounterMetricFamily("afd_payload_bytes", "Payload of the hops.", labels=[*_LABELS, "direction"])
        for page in self._pages:
            payload.add_metric([*_who(page), "a2f"], page.bytes_a2f)
            payload.add_metric([*_who(page), "f2a"], page.bytes_f2a)
        return payload

    def _ages(self) -> Iterator[Metric]:
        # Without a beat there is no age: a missing series is honest, a zero would read as fresh.
        beats = GaugeMetricFamily(
            "afd_heartbeat_age_seconds", "Time since the worker's last sign of life.", labels=_LABELS
        )
        words = GaugeMetricFamily(
            "afd_peer_message_age_seconds", "Time since a connected peer's last message.", labels=[*_LABELS, "peer"]
        )
        for page in self._pages:
            if page.heartbeat_ns:
                beats.add_metric(_who(page), max(0.0, self._now_s - page.heartbeat_ns / 1e9))
            for peer in page.peers_named:
                words.add_metric([*_who(page), str(peer.rank)], max(0.0, self._now_s - peer.heard_ns / 1e9))
        yield beats
        yield words


_LABELS = ("role", "rank")
_COUNTERS: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("afd_hops", "Hops finished.", lambda page: page.hops),
    ("afd_rows", "Rows of hidden states that went out and came back.", lambda page: page.rows),
    ("afd_steps", "Forwards of the model.", lambda page: page.steps),
    ("afd_wait_seconds", "Time waited: at attention for replies, at FFN for hops.", lambda page: page.wait_s),
    *((f"afd_{event.counter}", event.text, lambda page, event=event: page.events[event]) for event in Event),
)
_GAUGES: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("afd_last_step_hops", "Hops of the last forward.", lambda page: page.last_step_hops),
    ("afd_last_step_bytes", "Payload bytes of the last forward, both ways.", lambda page: page.last_step_bytes),
    ("afd_peers", "Peers connected now.", lambda page: page.peers),
    ("afd_peer_up", "1 when a peer is connected.", lambda page: int(page.peers > 0)),
    ("afd_queued_hops", "Hops that have arrived and wait for their turn.", lambda page: page.queue),
    ("afd_draining", "1 when this FFN server turns its peers away.", lambda page: int(page.draining)),
    ("afd_weight_bytes", "Bytes of this role's own weights.", lambda page: page.weight_bytes),
    ("afd_worker_pid", "Process that serves this role's hops.", lambda page: page.worker_pid),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Snapshot], Histogram]], ...] = (
    ("afd_hop_seconds", "Time of a hop as this side saw it.", lambda page: page.hop_times),
    ("afd_ffn_compute_seconds", "Time of one layer's FFN computation.", lambda page: page.compute_times),
    ("afd_step_seconds", "Time of a forward of the model.", lambda page: page.step_times),
)


def _who(page: Snapshot) -> list[str]:
    return [page.role, str(page.rank)]


def _one_of(
    name: str,
    text: str,
    states: type[enum.IntEnum],
    pages: Sequence[Snapshot],
    state_of: Callable[[Snapshot], enum.IntEnum],
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[*_LABELS, "state"])
    for page in pages:
        for state in states:
            family.add_metric([*_who(page), state.name.lower()], int(state_of(page) is state))
    return family


def _cumulated(times: Histogram) -> tuple[list[tuple[str, float]], float]:
    """The buckets as Prometheus has them, each with all below it, and the sum in seconds."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(repr, times.bounds_s), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets, times.sum_s


def render(pages: Sequence[Snapshot], now_s: float | None = None) -> str:
    """Prometheus text of a server's pages; names begin with ``afd_``, each series has the labels ``role`` and ``rank``.

    Args:
        pages: what ``StatusPages.snapshots`` gave.
        now_s: CLOCK_MONOTONIC in seconds (default: now), for the ages.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PageCollector(pages, time.monotonic() if now_s is None else now_s))
    return generate_latest(registry).decode()


def health(pages: Sequence[Snapshot], now_s: float, stale_after_s: float = 5.0) -> tuple[bool, str]:
    """Whether the server can do its work, and one line that says why or why not.

    An attention server without its FFN can't; an FFN server without peers can, since it waits for them, unless it
    drains. Every worker must be fine; of several troubles the worst one is told, with its rank.

    Args:
        pages: what ``StatusPages.snapshots`` gave.
        now_s: CLOCK_MONOTONIC in seconds.
        stale_after_s: the age in seconds from which on a heartbeat means that the worker hangs.
    """
    troubles = [(*found, page) for page in pages if (found := _trouble(page, now_s, stale_after_s)) is not None]
    if troubles:
        _, text, page = min(troubles, key=lambda trouble: (trouble[0], trouble[2].rank))
        return False, f"{page.role} server, rank {page.rank}: {text}"
    peers = sum(page.peers for page in pages)
    return True, f"{pages[0].role} server is ready, {peers} peer(s) connected"


def _trouble(page: Snapshot, now_s: float, stale_after_s: float) -> tuple[int, str] | None:
    """How bad it is (0 is the worst) and what it is; None when the worker is fine."""
    why = page.last_error or "no error was left"
    if page.state is State.FAILED:
        return 0, f"failed: {why}"
    if page.state is not State.READY:
        return 3, page.state.name.lower()
    if not page.heartbeat_ns:
        return 1, f"its worker {page.worker_pid} has not given a sign of life yet"
    age = now_s - page.heartbeat_ns / 1e9
    if age > stale_after_s:
        return 1, f"no sign of life from its worker {page.worker_pid} for {age:.1f} s"
    if page.peer_state is PeerState.GIVEN_UP:
        return 2, f"given up: no FFN server came back in time; requests fail until one does ({why})"
    if page.peer_state is PeerState.LOST:
        return 4, f"its FFN server is lost, hops wait for it ({why})"
    if page.peer_state is PeerState.WAITING:
        return 4, f"its FFN server is not connected ({why})"
    if page.draining:
        return 5, "draining"
    return None
