"""The status page in Prometheus form, and the judgement of health."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from afdpatch.runtime.status import Histogram, Snapshot, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of what ``render`` gives."""


class _PageCollector(Collector):
    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self._snapshot = snapshot
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        page = self._snapshot
        role = [page.role]
        for name, text, count in (
            ("afd_hops", "Hops finished.", page.hops),
            ("afd_rows", "Rows of hidden states that went out and came back.", page.rows),
            ("afd_steps", "Forwards of the model.", page.steps),
            *((f"afd_{event.counter}", event.text, count) for event, count in page.events.items()),
        ):
            yield _counter(name, text, role, count)
        payload = CounterMetricFamily("afd_payload_bytes", "Payload of the hops.", labels=["role", "direction"])
        payload.add_metric([*role, "a2f"], page.bytes_a2f)
        payload.add_metric([*role, "f2a"], page.bytes_f2a)
        yield payload
        for name, text, value in (
            ("afd_last_step_hops", "Hops of the last forward.", page.last_step_hops),
            ("afd_last_step_bytes", "Payload bytes of the last forward, both ways.", page.last_step_bytes),
            ("afd_peers", "Peers connected now.", page.peers),
            ("afd_peer_up", "1 when a peer is connected.", int(page.peers > 0)),
            ("afd_weight_bytes", "Bytes of this role's own weights.", page.weight_bytes),
            ("afd_worker_pid", "Process that serves this role's hops.", page.worker_pid),
        ):
            yield _gauge(name, text, role, value)
        # Without a beat there is no age: a missing series is honest, a zero would read as fresh.
        if page.heartbeat_ns:
            age = max(0.0, self._now_s - page.heartbeat_ns / 1e9)
            yield _gauge("afd_heartbeat_age_seconds", "Time since the worker's last sign of life.", role, age)
        tensors = GaugeMetricFamily("afd_weight_tensors", "Tensors of the checkpoint.", labels=["role", "taken"])
        tensors.add_metric([*role, "read"], page.weights_read)
        tensors.add_metric([*role, "skipped"], page.weights_skipped)
        yield tensors
        states = GaugeMetricFamily("afd_state", "1 for the state that the server is in.", labels=["role", "state"])
        for state in State:
            states.add_metric([*role, state.name.lower()], int(page.state is state))
        yield states
        info = GaugeMetricFamily("afd_build_info", "The patch set in effect.", labels=["role", "manifest_digest"])
        info.add_metric([*role, page.manifest_digest], 1)
        yield info
        for name, text, times in (
            ("afd_hop_seconds", "Time of a hop as this side saw it.", page.hop_times),
            ("afd_ffn_compute_seconds", "Time of one layer's FFN computation.", page.compute_times),
            ("afd_step_seconds", "Time of a forward of the model.", page.step_times),
        ):
            yield _histogram(name, text, role, times)


def _counter(name: str, text: str, role: Sequence[str], value: int) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["role"])
    family.add_metric(role, value)
    return family


def _gauge(name: str, text: str, role: Sequence[str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["role"])
    family.add_metric(role, value)
    return family


def _histogram(name: str, text: str, role: Sequence[str], times: Histogram) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(repr, times.bounds_s), "+Inf"), times.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family = HistogramMetricFamily(name, text, labels=["role"])
    family.add_metric(role, buckets, times.sum_s)
    return family


def render(snapshot: Snapshot, now_s: float | None = None) -> str:
    """Prometheus text of a page; names begin with ``afd_``, every series has the label ``role``.

    Args:
        snapshot: what ``StatusPage.snapshot`` gave.
        now_s: CLOCK_MONOTONIC in seconds (default: now), for the age of the heartbeat.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PageCollector(snapshot, time.monotonic() if now_s is None else now_s))
    return generate_latest(registry).decode()


def health(snapshot: Snapshot, now_s: float, stale_after_s: float = 5.0) -> tuple[bool, str]:
    """Whether the server can do its work, and one line that says why or why not.

    An attention server without its FFN can't; an FFN server without peers can, since it waits for them.

    Args:
        snapshot: what ``StatusPage.snapshot`` gave.
        now_s: CLOCK_MONOTONIC in seconds.
        stale_after_s: the age in seconds from which on a heartbeat means that the worker hangs.
    """
    name = f"{snapshot.role} server"
    if snapshot.state is State.FAILED:
        return False, f"{name} failed: {snapshot.last_error or 'no text was left'}"
    if snapshot.state is not State.READY:
        return False, f"{name} is {snapshot.state.name.lower()}"
    if not snapshot.heartbeat_ns:
        return False, f"{name}: its worker {snapshot.worker_pid} has not given a sign of life yet"
    age = now_s - snapshot.heartbeat_ns / 1e9
    if age > stale_after_s:
        return False, f"{name}: no sign of life from its worker {snapshot.worker_pid} for {age:.1f} s"
    if snapshot.role == "attention" and not snapshot.peers:
        return False, f"{name}: its FFN server is not connected ({snapshot.last_error or 'no error was left'})"
    return True, f"{name} is ready, {snapshot.peers} peer(s) connected"
