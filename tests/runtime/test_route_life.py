"""An attention rank's route from its start to its end: idleness, mismatches, servers that load or die, closing."""

import contextlib
import gc
import os
import signal
import threading
import time

import pytest
import torch

from afdpatch.runtime.connectors.base import (
    ConnectTimeout,
    GreetingMismatch,
    NoFfnServer,
    PeerLost,
)
from afdpatch.runtime.events import Event
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.snapshot import PeerState
from afdpatch.runtime.status import StatusPage

from .helpers import (
    HANGING_LAYER,
    strike,
    until,
)
from .routes import ONE, route_to, said, seen, servers


@pytest.fixture
def page():
    return StatusPage.create("attention")


def test_an_idle_route_notices_a_loss_and_a_return(transport, page):
    with servers(transport, 1) as ffn, route_to(ffn, page) as route:
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        ffn.kill(0)
        until(lambda: page.snapshot().peer_state is PeerState.LOST and page.snapshot().peers == 0, "lost")
        ffn.start(0)
        until(lambda: page.snapshot().peer_state is PeerState.CONNECTED and page.snapshot().peers == 1, "back")
        assert torch.equal(route.hop(ONE, 0), ONE * 2) and seen(page, Event.REPEAT) == 0
        assert watch.stop()


def test_an_idle_route_is_kept_by_its_pings(transport, page):
    with servers(transport, 1, start=False) as ffn:
        ffn.start(0, options={"peer_timeout_s": 3})
        with route_to(ffn, page) as route:
            watch = PeerWatch(route, page, period_s=0.05)
            watch.start()
            end = time.monotonic() + 8
            until(lambda: time.monotonic() > end, "idle")
            assert ffn.pages[0].snapshot().peers == 1 and seen(page, Event.PEER_LOST) == 0
            assert watch.stop()
            until(lambda: ffn.pages[0].snapshot().peers == 0, "without them it is dropped")
            assert torch.equal(route.hop(ONE, 0), ONE * 2)  # and comes back


def test_an_idle_route_notices_a_server_that_was_stopped_and_that_goes_on(transport, page):
    with servers(transport, 1) as ffn, route_to(ffn, page, hop_timeout_s=3) as route:
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        end = time.monotonic() + 8
        until(lambda: time.monotonic() > end, "idle for longer than the deadline, the pings being answered")
        assert seen(page, Event.PEER_LOST) == 0
        strike(ffn.processes[0].pid, signal.SIGSTOP)
        try:
            until(lambda: page.snapshot().peer_state is PeerState.LOST, "lost, though its connection stands")
        finally:
            os.kill(ffn.processes[0].pid, signal.SIGCONT)
        until(lambda: page.snapshot().peer_state is PeerState.CONNECTED, "back")
        assert torch.equal(route.hop(ONE, 0), ONE * 2) and seen(page, Event.REPEAT) == 0
        assert watch.stop()


def test_a_mismatch_at_the_start_is_told_at_once(transport):
    with servers(transport, 1, start=False) as ffn:
        ffn.start(0, dtype="bfloat16")
        with route_to(ffn, connect=False) as route, pytest.raises(GreetingMismatch, match="dtype"):
            route.connect(said(ffn))


def test_a_mismatch_later_is_kept_and_tried_again(transport, page):
    with servers(transport, 1) as ffn, route_to(ffn, page, recovery_timeout_s=100) as route:
        ffn.kill(0)
        ffn.start(0, dtype="bfloat16")
        results = []
        thread = threading.Thread(target=lambda: results.append(route.hop(ONE, 0)))
        thread.start()
        until(lambda: "dtype" in page.snapshot().last_error, "the reason is kept")
        ffn.processes[0].join(20)  # it never had a peer
        assert ffn.processes[0].exitcode == 1 and not results
        ffn.kill(0)
        ffn.start(0)
        thread.join(20)
        assert torch.equal(results[0], ONE * 2)


def test_a_server_of_another_rank_at_the_address_is_refused(transport):
    with servers(transport, 2, start=False) as ffn:
        ffn.start(0, rank_told=1)
        with route_to(ffn, connect=False) as route, pytest.raises(GreetingMismatch, match="rank: ours 0, theirs 1"):
            route.connect(said(ffn))


def test_a_server_that_never_comes_ends_at_the_deadline():
    with servers("shm", 2, attention=1, start=False) as ffn, route_to(ffn, connect=False) as route:
        ffn.start(1)
        with pytest.raises(ConnectTimeout, match=r"^ffn0 not connected within \d+\.\d s: no FFN server answered"):
            route.connect(said(ffn), time.monotonic() + 3)


@pytest.mark.parametrize("while_it", ["waits", "loads itself"])
def test_a_server_that_dies_while_loading_is_waited_for(transport, page, while_it):
    with servers(transport, 1, start=False) as ffn, route_to(ffn, page, connect=False) as route:
        ffn.start(0, serve=False)
        route.connect(said(ffn))
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        with pytest.raises(ConnectTimeout, match="still loading"):
            route.wait_ready(time.monotonic() + 0.1)
        if while_it == "loads itself":
            ffn.kill(0)
            until(lambda: seen(page, Event.PEER_LOST) == 1, "the loss is seen")
        ready = threading.Thread(target=route.wait_ready)
        ready.start()
        if while_it == "waits":
            ffn.kill(0)
            until(lambda: seen(page, Event.PEER_LOST) == 1, "the loss is seen")
        ffn.start(0, serve=False)
        until(lambda: ffn.pages[0].snapshot().peers == 1, "greeted again")
        assert ready.is_alive()
        os.kill(ffn.processes[0].pid, signal.SIGUSR1)
        ready.join(20)
        assert not ready.is_alive() and seen(page, Event.PEER_RETURNED) == 1
        assert torch.equal(route.hop(ONE, 0), ONE * 2)
        assert watch.stop()


def test_a_server_that_dies_while_loading_is_waited_for_until_the_deadline(transport):
    with servers(transport, 1, start=False) as ffn, route_to(ffn, connect=False) as route:
        ffn.start(0, serve=False)
        route.connect(said(ffn))
        ffn.kill(0)
        with pytest.raises(ConnectTimeout, match=r"^ffn0 not connected within \d+\.\d s: no FFN server answered"):
            route.wait_ready(time.monotonic() + 3)


def test_another_server_in_the_place_of_one_that_died_while_loading_ends_the_start(transport, page):
    with servers(transport, 1, start=False) as ffn, route_to(ffn, page, connect=False) as route:
        ffn.start(0, serve=False)
        route.connect(said(ffn))
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        ffn.kill(0)
        until(lambda: seen(page, Event.PEER_LOST) == 1, "the loss is seen")
        ffn.start(0, serve=False, dtype="bfloat16")
        with pytest.raises(GreetingMismatch, match="dtype"):
            route.wait_ready()
        ffn.processes[0].join(20)
        assert ffn.processes[0].exitcode == 1 and watch.stop()


def test_a_step_may_have_more_patience_than_a_request_has():
    with servers("shm", 1) as ffn, route_to(ffn, recovery_timeout_s=1, hop_timeout_s=1) as route:
        ffn.kill(0)
        results = []
        route.begin_step(patience_s=60)
        thread = threading.Thread(target=lambda: results.append(route.hop(ONE, 0)))
        thread.start()
        thread.join(3)
        assert thread.is_alive()
        ffn.start(0)
        thread.join(20)
        assert torch.equal(results[0], ONE * 2)
        ffn.kill(0)
        route.begin_step()
        with pytest.raises(NoFfnServer):
            route.hop(ONE, 0)


def test_a_server_that_loads_for_longer_than_peers_may_be_silent_is_waited_for(transport, page):
    with servers(transport, 1, start=False) as ffn:
        ffn.start(0, serve=False, options={"peer_timeout_s": 4})
        with route_to(ffn, page, connect=False) as route:
            route.connect(said(ffn))
            watch = PeerWatch(route, page, period_s=0.05)
            watch.start()
            begin = time.monotonic()
            load = threading.Timer(10.0, os.kill, (ffn.processes[0].pid, signal.SIGUSR1))
            load.start()
            route.wait_ready()
            assert time.monotonic() - begin > 4  # longer than a rank may be silent
            assert seen(page, Event.PEER_LOST) == seen(ffn.pages[0], Event.PEER_LOST) == 0
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
            assert watch.stop()


def test_attention_may_start_first(transport):
    with servers(transport, 1, start=False) as ffn, route_to(ffn, connect=False, connect_timeout_s=100) as route:
        thread = threading.Thread(target=lambda: route.connect(said(ffn)))
        thread.start()
        ffn.start(0)
        thread.join(60)
        assert torch.equal(route.hop(ONE, 0), ONE * 2)


@pytest.mark.parametrize("where", ["hop", "repeat", "connect"])
def test_closing_ends_what_waits(where):
    long = dict.fromkeys(("hop_timeout_s", "recovery_timeout_s", "connect_timeout_s"), 100)
    with servers("shm", 1) as ffn, route_to(ffn, connect=where != "connect", **long) as route:
        if where != "hop":
            ffn.kill(0)
        caught = []

        def wait():
            try:
                route.connect(said(ffn)) if where == "connect" else route.hop(ONE, HANGING_LAYER)
            except PeerLost as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        threading.Event().wait(0.2)
        begin = time.monotonic()
        route.close()
        thread.join(20)
        assert not thread.is_alive() and "closed" in str(caught[0])
        assert time.monotonic() - begin < 50  # close() itself waits for the hop to end
        route.close()


def test_a_signal_handler_may_close_the_route_whose_hop_it_interrupts():
    class Ended(Exception):
        pass

    with servers("shm", 1) as ffn, route_to(ffn) as route:

        def end(number, frame):
            route.close()
            raise Ended

        before = signal.signal(signal.SIGALRM, end)
        try:
            with pytest.raises(Ended):
                signal.setitimer(signal.ITIMER_REAL, 2)  # the hop has begun by then
                route.hop(ONE, HANGING_LAYER)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def connections():
    """This process's descriptors of the kinds that a connection has."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith(("socket:", "anon_inode:[eventfd", "/memfd:afdpatch-hop")):
                found.append(link)
    return len(found)


def test_losses_and_returns_leak_no_descriptor(transport):
    with servers(transport, 2) as ffn, route_to(ffn, rank=0) as route:
        route.hop(ONE, 0)
        gc.collect()  # what earlier tests left
        before = connections()
        for _ in range(4):
            ffn.kill(0)
            route.hop(ONE, 0)
            ffn.start(0)
            until(lambda: route.tend() or ffn.pages[0].snapshot().peers == 1, "home again")
            until(lambda: route.tend() or ffn.pages[1].snapshot().peers == 0, "and only there")
            until(lambda: route.tend() or connections() <= before, "no more descriptors than before")
