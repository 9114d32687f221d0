"""An attention rank's hops: repeats, takeovers, ways back, giving up; FFN servers are real processes."""

import os
import signal
import threading
import time

import pytest
import torch

from afdpatch.runtime.connectors.base import (
    FfnError,
    NoFfnServer,
)
from afdpatch.runtime.events import Event
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.route import QUICK_S
from afdpatch.runtime.snapshot import PeerState
from afdpatch.runtime.status import StatusPage

from .helpers import (
    FAILING_LAYER,
    HANGING_LAYER,
    HIDDEN,
    strike,
    until,
)
from .routes import ONE, route_to, said, seen, servers


@pytest.fixture
def page():
    return StatusPage.create("attention")


def test_hops_go_to_the_home_servers_in_turn(transport, page):
    with servers(transport, 3) as ffn, route_to(ffn, page) as route:
        for number in range(12):
            hidden = torch.full((2, HIDDEN), float(number))
            assert torch.equal(route.hop(hidden, 0), hidden * 2)
        ffn.counted(0, 6)
        ffn.counted(1, 6)
        assert ffn.hops(2) == 0
        snapshot = page.snapshot()
        assert (snapshot.hops, snapshot.rows, snapshot.peers) == (12, 24, 2)
        assert snapshot.peer_state is PeerState.CONNECTED
    assert page.snapshot().peer_state is PeerState.NONE and page.snapshot().peers == 0


def test_a_rank_that_hops_for_a_group_uses_the_servers_of_all_its_ranks(transport):
    with servers(transport, 2, attention=2) as ffn, route_to(ffn, group=2) as route:
        for _ in range(6):
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
        ffn.counted(0, 3)
        ffn.counted(1, 3)


def test_steps_are_numbered(page):
    with servers("shm", 1) as ffn, route_to(ffn) as route:
        for _ in range(3):
            route.begin_step()
            route.hop(ONE, 0)
            route.hop(ONE, 0)
        until(lambda: ffn.pages[0].snapshot().steps == 3, "three steps")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_hop_is_sent_again_to_the_other_home_server(transport, page, how):
    with servers(transport, 2, attention=1) as ffn, route_to(ffn, page, hop_timeout_s=3) as route:
        strike(ffn.processes[0].pid, how)
        for _ in range(4):
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
        ffn.counted(1, 4)
        assert page.snapshot().hops == 4
        assert seen(page, Event.REPEAT) == seen(page, Event.PEER_LOST) == 1
        assert seen(page, Event.TAKEOVER) == seen(page, Event.ERROR) == 0


def test_another_blocks_server_takes_over_and_the_hops_come_home(transport, page):
    with servers(transport, 2) as ffn, route_to(ffn, page, rank=0) as route:
        ffn.kill(0)
        for _ in range(3):
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
        ffn.counted(1, 3)
        assert seen(page, Event.TAKEOVER) == 3 and seen(page, Event.REPEAT) == 1
        ffn.start(0)
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        until(lambda: ffn.pages[1].snapshot().peers == 0, "the other block's server is left")
        assert torch.equal(route.hop(ONE, 0), ONE * 2)
        ffn.counted(0, 1)
        assert seen(page, Event.PEER_RETURNED) == 1 and page.snapshot().peers == 1
        assert watch.stop()


def test_a_hop_waits_for_its_only_server_to_come_back(transport, page):
    with servers(transport, 1) as ffn, route_to(ffn, page) as route:
        ffn.kill(0)
        results = []
        thread = threading.Thread(target=lambda: results.append(route.hop(ONE, 0)))
        thread.start()
        until(lambda: page.snapshot().peer_state is PeerState.LOST, "told on the page")
        ffn.start(0, serve=False)
        until(lambda: ffn.pages[0].snapshot().peers == 1, "connected, and it loads")
        assert not results and page.snapshot().peer_state is PeerState.LOST
        os.kill(ffn.processes[0].pid, signal.SIGUSR1)
        thread.join(20)
        assert torch.equal(results[0], ONE * 2)
        assert page.snapshot().peer_state is PeerState.CONNECTED and seen(page, Event.PEER_RETURNED) == 1


def test_a_loading_server_gets_no_hops_while_another_serves(transport, page):
    with servers(transport, 2, attention=1, start=False) as ffn:
        ffn.start(0)
        ffn.start(1, serve=False)
        with route_to(ffn, page, connect=False) as route:
            route.connect(said(ffn))
            for _ in range(4):
                assert torch.equal(route.hop(ONE, 0), ONE * 2)
            ffn.counted(0, 4)
            assert page.snapshot().peers == 2
            os.kill(ffn.processes[1].pid, signal.SIGUSR1)
            route.wait_ready()
            route.hop(ONE, 0)
            route.hop(ONE, 0)
            ffn.counted(1, 1)


def test_a_route_without_a_server_gives_up_then_fails_fast_until_one_is_back(transport, page):
    with servers(transport, 1) as ffn, route_to(ffn, page, recovery_timeout_s=3, hop_timeout_s=3) as route:
        ffn.kill(0)
        with pytest.raises(NoFfnServer, match=r"sequence 1: no FFN server answered within \d+\.\d s.*ffn0.*start one"):
            route.hop(ONE, 0)
        assert page.snapshot().peer_state is PeerState.GIVEN_UP and seen(page, Event.GIVEN_UP) == 1
        with pytest.raises(NoFfnServer):
            route.hop(ONE, 0)
        assert page.snapshot().peer_state is PeerState.GIVEN_UP and seen(page, Event.ERROR) == 2
        ffn.start(0)
        until(lambda: route.tend() or page.snapshot().peer_state is PeerState.CONNECTED, "back by itself")
        assert torch.equal(route.hop(ONE, 0), ONE * 2)


def test_after_giving_up_a_hop_tries_for_half_a_second_only(page):
    with servers("shm", 1) as ffn, route_to(ffn, page, recovery_timeout_s=100) as route:
        ffn.kill(0)
        route.begin_step(time.monotonic() + 0.1)
        with pytest.raises(NoFfnServer):
            route.hop(ONE, 0)
        route.begin_step()
        begin = time.monotonic()
        with pytest.raises(NoFfnServer):
            route.hop(ONE, 0)
        assert time.monotonic() - begin < 50  # not after 100 s


def slowly(layer, hidden):
    """An FFN that takes longer than a hop looks for a server after one has been given up."""
    threading.Event().wait(1.5 * QUICK_S)
    return hidden * 2


def test_a_server_that_is_back_has_its_time_to_answer(page):
    with servers("shm", 1) as ffn, route_to(ffn, page, recovery_timeout_s=100) as route:
        ffn.kill(0)
        route.begin_step(time.monotonic() + 0.1)
        with pytest.raises(NoFfnServer):
            route.hop(ONE, 0)
        ffn.start(0, function=slowly)
        route.begin_step()
        lost = seen(page, Event.PEER_LOST)
        assert torch.equal(route.hop(ONE, 0), ONE * 2)  # nobody tends: the hop itself finds the server
        assert seen(page, Event.PEER_LOST) == lost


def test_no_hop_waits_beyond_its_steps_deadline():
    with servers("shm", 1) as ffn, route_to(ffn, hop_timeout_s=100, recovery_timeout_s=100) as route:
        route.begin_step(time.monotonic() + 0.3)
        with pytest.raises(NoFfnServer):
            route.hop(ONE, HANGING_LAYER)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_hop_ends_with_its_server(transport, page, how):
    with servers(transport, 1) as ffn, route_to(ffn, page, hop_timeout_s=100, recovery_timeout_s=100) as route:
        route.hop(ONE, 0)
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        strike(ffn.processes[0].pid, how)
        caught = []

        def hop():
            try:
                route.hop(ONE, 0)
            except NoFfnServer as error:
                caught.append(error)

        thread = threading.Thread(target=hop)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        page.request_end(time.monotonic() + 0.5)
        thread.join(20)
        assert not thread.is_alive() and "no FFN server answered" in str(caught[0])
        assert watch.stop()


def test_hops_go_on_while_a_server_ends(page):
    with servers("shm", 1) as ffn, route_to(ffn, page) as route:
        route.end_by(time.monotonic() - 1)
        assert torch.equal(route.hop(ONE, 0), ONE * 2)
        route.end_by(time.monotonic() - 1)
        assert torch.equal(route.hop(ONE, 0), ONE * 2) and seen(page, Event.PEER_LOST) == 0


def test_a_computation_that_fails_is_not_repeated(transport, page):
    with servers(transport, 2, attention=1) as ffn, route_to(ffn, page) as route:
        with pytest.raises(FfnError, match="no such expert"):
            route.hop(ONE, FAILING_LAYER)
        assert sum(ffn.pages[rank].snapshot().errors for rank in range(2)) == 1
        assert seen(page, Event.REPEAT) == 0 and seen(page, Event.ERROR) == 1
        assert torch.equal(route.hop(ONE, 0), ONE * 2)


def test_a_stopped_server_is_left_for_another_though_it_takes_connections(transport, page):
    with servers(transport, 2) as ffn, route_to(ffn, page, hop_timeout_s=0.3) as route:
        strike(ffn.processes[0].pid, signal.SIGSTOP)
        try:
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
            # On a busy machine the other one may be late the first time too.
            until(lambda: ffn.hops(1) > 0, "a hop at ffn1")
        finally:
            os.kill(ffn.processes[0].pid, signal.SIGCONT)


def test_a_drained_server_is_left_without_an_error(transport, page):
    with servers(transport, 2) as ffn, route_to(ffn, page) as route:
        stop = threading.Event()
        wrong = []

        def work():
            number = 0
            while not stop.is_set():
                number += 1
                hidden = torch.full((2, HIDDEN), float(number))
                if not torch.equal(route.hop(hidden, 0), hidden * 2):
                    wrong.append(number)

        thread = threading.Thread(target=work)
        thread.start()
        watch = PeerWatch(route, page, period_s=0.05)
        watch.start()
        until(lambda: ffn.hops(0) > 20, "hops go home")
        ffn.pages[0].request_drain(True)
        until(lambda: ffn.hops(1) > 20 and ffn.pages[0].snapshot().peers == 0, "the other serves")
        ffn.pages[0].request_drain(False)
        before = ffn.hops(0)
        until(lambda: ffn.hops(0) > before + 20 and ffn.pages[1].snapshot().peers == 0, "hops come home")
        stop.set()
        thread.join(20)
        assert watch.stop() and not wrong and not thread.is_alive()
        assert seen(page, Event.ERROR) == seen(page, Event.GIVEN_UP) == 0
