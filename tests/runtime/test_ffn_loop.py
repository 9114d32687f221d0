"""The FFN loop: heartbeat, death and end."""

import contextlib
import itertools
import select
import socket
import threading
import time

import pytest
import torch

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import AddressInUse, PeerLost
from afdpatch.runtime.connectors.shm import ShmFfnConnector, address_of
from afdpatch.runtime.events import Event
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.metrics import health
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import State, StatusPage

from .helpers import HANGING_LAYER, HIDDEN, compute, connected, ffn_process, greeting, new_address, until


@pytest.fixture
def address():
    return new_address()


@contextlib.contextmanager
def running(address, page, function=compute, **options):
    loop = FfnLoop(ShmFfnConnector(address, page=page), function, page, greeting("ffn"), **options)
    loop.start()
    loop.serve()
    try:
        yield loop
    finally:
        loop.stop()


def test_the_loop_counts_hops_and_steps(address, page):
    with running(address, page), connected(address) as attention:
        for step in (1, 2):
            attention.step = step
            for layer in (0, 0, 0):
                attention.hop(torch.ones(2, HIDDEN), layer)
        until(lambda: page.snapshot().hops == 6, "six hops")
        until(lambda: page.snapshot().steps == 2, "two steps")
        seen = page.snapshot()
        assert (seen.rows, seen.bytes_a2f, seen.peers) == (12, 12 * HIDDEN * 4, 1)
        assert sum(seen.compute_times.counts) == sum(seen.hop_times.counts) == 6


def test_the_heart_beats_while_idle_and_twice_a_second(address, page):
    with running(address, page):
        beats = set()
        until(lambda: beats.add(page.snapshot().heartbeat_ns) or len(beats) == 8, "eight beats")
    # The first ones are those of the start; and a busy machine may be late for any of the others, not for all.
    idle = sorted(beats)[2:]
    assert min(later - beat for beat, later in itertools.pairwise(idle)) <= 500_000_000


def test_the_heart_beats_while_the_weights_load(address, page):
    loop = FfnLoop(ShmFfnConnector(address, page=page), compute, page, greeting("ffn"))
    loop.start()
    first = page.snapshot().heartbeat_ns
    until(lambda: page.snapshot().heartbeat_ns > first, "another beat")
    assert loop.stop()


class Counting(ShmFfnConnector):
    """Counts how often it waits."""

    waits = 0

    def _wait(self, timeout_s):
        self.waits += 1
        return super()._wait(timeout_s)


def test_the_heart_beats_at_its_pace_while_a_hop_waits_for_the_weights(address, page):
    connector = Counting(address, page=page)
    loop = FfnLoop(connector, compute, page, greeting("ffn"))
    loop.start()
    with connected(address) as attention:
        results = []
        thread = threading.Thread(target=lambda: results.append(attention.hop(torch.ones(1, HIDDEN), 0)))
        thread.start()
        before = connector.waits
        for _ in range(3):
            last = page.snapshot().heartbeat_ns
            until(lambda last=last: page.snapshot().heartbeat_ns > last, "another beat")
        assert not results and page.snapshot().hops == 0
        assert connector.waits - before < 20  # a hop that may not be read yet must not wake the thread
        loop.serve()
        thread.join(10)
        assert len(results) == 1
    assert loop.stop()


def test_events_without_a_hop_dont_keep_receive_beyond_its_time(address):
    class Flooded(ShmFfnConnector):
        def _wait(self, timeout_s):
            return [(self._listener.fileno(), select.POLLIN)]

    connector = Flooded(address)
    connector.listen(greeting("ffn"))
    assert connector.receive(0.05) == []
    connector.close()


def test_the_heart_beats_under_a_flood_of_strangers(address, page):
    with running(address, page):
        stop = threading.Event()

        def flood():
            while not stop.is_set():
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.connect(address)
                    sock.send(b"x")

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for _ in range(3):
                last = page.snapshot().heartbeat_ns
                until(lambda last=last: page.snapshot().heartbeat_ns > last, "another beat")
        finally:
            stop.set()
            thread.join()
        assert page.snapshot().peers_refused > 0


def test_a_computation_that_hangs_stops_the_heart_and_the_server_is_not_healthy(address, page):
    page.set_state(State.READY)
    with ffn_process(address, page), connected(address, hop_timeout_s=200) as attention:
        until(lambda: health([page.snapshot()], time.monotonic())[0], "healthy")

        def hop():
            with pytest.raises(PeerLost):
                attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)

        thread = threading.Thread(target=hop)
        thread.start()
        until(lambda: not health([page.snapshot()], time.monotonic(), 1.5)[0], "not healthy any more")
        assert "no sign of life" in health([page.snapshot()], time.monotonic(), 1.5)[1]
        attention.close()
        thread.join(10)


def test_an_error_in_the_loop_itself_fails_the_page_and_is_told(address, page):
    class Broken(ShmFfnConnector):
        def receive(self, timeout_s):
            if super().receive(timeout_s):
                raise RuntimeError("the floor is gone")
            return []

    deaths = []
    loop = FfnLoop(Broken(address, page=page), compute, page, greeting("ffn"), on_death=deaths.append)
    loop.start()
    loop.serve()
    with connected(address) as attention, pytest.raises(PeerLost):
        attention.hop(torch.ones(1, HIDDEN), 0)
    until(lambda: not loop.alive, "the loop has ended")
    assert str(deaths[0]) == "the floor is gone"
    assert page.snapshot().state is State.FAILED and "the floor is gone" in page.snapshot().last_error
    assert loop.stop()


def test_the_thread_runs_inside_the_wrapper(address, page):
    seen = []

    def look(layer, hidden):
        seen.append(torch.is_inference_mode_enabled())
        return hidden

    with running(address, page, look, wrap=torch.inference_mode), connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    assert seen == [True]


def test_a_wrapper_that_fails_is_a_death(address, page):
    @contextlib.contextmanager
    def broken():
        raise RuntimeError("no context")
        yield

    deaths = []
    with running(address, page, wrap=broken, on_death=deaths.append):
        until(lambda: bool(deaths), "told")
    assert page.snapshot().state is State.FAILED


def test_stopping_is_clean(address, page, capfd):
    with running(address, page) as loop, connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
        assert loop.stop(20) and not loop.alive
        until(lambda: not attention.peer_alive(), "the peer knows")
        with pytest.raises(PeerLost):
            attention.hop(torch.ones(1, HIDDEN), 0)
        assert loop.stop()
    assert "Traceback" not in capfd.readouterr().err
    assert page.snapshot().state is not State.FAILED and page.snapshot().peers == 0


def test_stopping_a_loop_that_hangs_says_so(address, page):
    hangs, free = threading.Event(), threading.Event()

    def hang(layer, hidden):
        hangs.set()
        free.wait(60)
        return hidden

    with running(address, page, hang) as loop, connected(address, hop_timeout_s=2) as attention:
        with pytest.raises(PeerLost):
            attention.hop(torch.ones(1, HIDDEN), 0)
        assert hangs.wait(20) and loop.stop(0.1) is False
        free.set()
        until(lambda: not loop.alive, "it ends when it can")


def test_the_address_is_free_after_stopping(address, page):
    with running(address, page), pytest.raises(AddressInUse), running(address, page):
        pass
    with running(address, page), connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)


def test_a_loop_starts_once(address, page):
    with running(address, page) as loop, pytest.raises(RuntimeError, match="already started"):
        loop.start()


def test_an_idle_attention_server_learns_that_its_peer_has_gone(page):
    name = new_address().strip("\0")
    config = AfdConfig.parse({"host": name, "connector_extra_config": {"connect_timeout_s": 60.0}})
    ours = StatusPage.create("attention")
    ours.set_state(State.READY)
    counts = {"num_attention_ranks": 1, "num_ffn_ranks": 1}
    route = Route(config, 0, ours)
    watch = PeerWatch(route, ours, period_s=0.05)
    try:
        with ffn_process(address_of(config.host, config.port, 0), page, **counts) as process:
            route.connect(greeting("attention", **counts))
            watch.start()
            until(lambda: health([ours.snapshot()], time.monotonic())[0], "healthy")
            process.kill()
            until(lambda: not health([ours.snapshot()], time.monotonic())[0], "not healthy any more")
            assert "FFN server is lost, hops wait" in health([ours.snapshot()], time.monotonic())[1]
            until(lambda: ours.snapshot().events[Event.PEER_LOST] == 1 and ours.snapshot().peers == 0, "counted")
    finally:
        assert watch.stop()
        route.close()
