"""An attention rank's route: repeats, takeovers, ways back, giving up; FFN servers are real processes."""

import contextlib
import gc
import os
import signal
import threading
import time

import pytest
import torch

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import (
    ConnectTimeout,
    FfnError,
    GreetingMismatch,
    NoFfnServer,
    PeerLost,
)
from afdpatch.runtime.events import Event
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.route import QUICK_S, Route
from afdpatch.runtime.snapshot import PeerState
from afdpatch.runtime.status import StatusPage

from .helpers import (
    FAILING_LAYER,
    HANGING_LAYER,
    HIDDEN,
    attention_connector,
    ffn_process,
    greeting,
    new_address,
    strike,
    until,
)

ONE = torch.ones(1, HIDDEN)


class Servers:
    """FFN servers of one configuration, each a process that can be started again."""

    def __init__(self, transport: str, count: int, attention: int) -> None:
        self.count = count
        self.attention = attention
        self.addresses = [new_address(transport) for _ in range(count)]
        self.pages = {}
        self.processes = {}
        self._stacks = {}

    def start(self, rank, *, rank_told=None, **options):
        self.pages[rank] = StatusPage.create("ffn")
        stack = self._stacks[rank] = contextlib.ExitStack()
        changes = {
            "rank": rank if rank_told is None else rank_told,
            "num_ffn_ranks": self.count,
            "num_attention_ranks": self.attention,
            **options,
        }
        self.processes[rank] = stack.enter_context(ffn_process(self.addresses[rank], self.pages[rank], **changes))

    def kill(self, rank):
        self._stacks.pop(rank).close()

    def stop_all(self):
        for rank in list(self._stacks):
            self.kill(rank)

    def hops(self, rank):
        return self.pages[rank].snapshot().hops

    def counted(self, rank, hops):
        """A server counts a hop once it has answered it."""
        until(lambda: self.hops(rank) == hops, f"{hops} hops at ffn{rank}")

    def make(self, rank):
        return attention_connector(self.addresses[rank])


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


@pytest.fixture
def page():
    return StatusPage.create("attention")


@contextlib.contextmanager
def servers(transport, count, *, attention=2, start=True):
    found = Servers(transport, count, attention)
    try:
        if start:
            for rank in range(count):
                found.start(rank)
        yield found
    finally:
        found.stop_all()


@contextlib.contextmanager
def route_to(servers, page=None, *, rank=0, group=1, connect=True, **times):
    config = AfdConfig.parse(
        {
            "num_attention_ranks": servers.attention,
            "num_ffn_ranks": servers.count,
            "connector_extra_config": {"hop_timeout_s": 5, "recovery_timeout_s": 20, "connect_timeout_s": 20, **times},
        }
    )
    route = Route(config, rank, page, servers.make, group=group)
    try:
        if connect:
            route.connect(said(servers, rank))
            route.wait_ready()
        yield route
    finally:
        route.close()


def said(servers, rank=0):
    return greeting("attention", rank=rank, num_attention_ranks=servers.attention, num_ffn_ranks=servers.count)


def seen(page, event):
    return page.snapshot().events[event]


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
