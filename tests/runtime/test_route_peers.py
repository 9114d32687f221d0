"""An attention rank's connections alone, over stand-ins: threads that use, tend and close them."""

import logging
import threading
import time

import pytest

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import AttentionConnector, PeerLost, Unreachable
from afdpatch.runtime.events import Event
from afdpatch.runtime.peers import Peers
from afdpatch.runtime.snapshot import PeerState
from afdpatch.runtime.status import StatusPage

from .helpers import greeting
from .routes import seen

HOME, OTHER = 0, 1


class StandIn(AttentionConnector):
    """A connection to a server that is there, or isn't, or takes connections and says nothing."""

    where = "here"

    def __init__(self, world, rank):
        self.world = world
        self.rank = rank
        self.ended = threading.Event()

    @property
    def serving(self):
        return self.peer_alive()

    def connect(self, greeting_, deadline_s):
        if self.rank in self.world.silent:
            self.world.waits.set()
            if self.ended.wait(max(0.0, deadline_s - time.monotonic())):
                raise PeerLost("closed meanwhile")
        if self.rank not in self.world.there:
            raise Unreachable("nobody there")
        return greeting("ffn", rank=self.rank, num_ffn_ranks=2)

    def wait_ready(self, deadline_s):
        pass

    def hop(self, *args, **kwargs):
        raise AssertionError("connections know no hop")

    def ping(self, silent_s):
        pass

    def peer_alive(self):
        return not self.ended.is_set() and self.rank in self.world.there

    def close(self):
        self.ended.set()


class World:
    """Two FFN servers, a home one and another block's, and one attention rank's connections to them."""

    def __init__(self):
        self.there = {HOME, OTHER}
        self.silent = set()
        self.waits = threading.Event()  # a greeting is under way that nobody answers
        self.page = StatusPage.create("attention")
        config = AfdConfig.parse({"num_attention_ranks": 2, "num_ffn_ranks": 2})
        self.peers = Peers(config, 0, self.page, lambda rank: StandIn(self, rank))
        self.in_use = threading.Lock()

    def start(self):
        self.peers.connect(greeting("attention"))
        self.peers.wait_ready()

    def tend(self):
        self.peers.tend(self.in_use)

    def serving(self):
        return [rank for rank, _ in self.peers.serving]

    def take_over(self):
        """The home server ends; the other one serves."""
        self.there.discard(HOME)
        self.peers.find(time.monotonic() + 20)
        assert self.serving() == [OTHER]


@pytest.fixture
def world():
    world = World()
    yield world
    world.peers.close()


def test_a_connection_in_use_is_not_left_for_a_home_servers(world):
    world.start()
    assert (world.peers.home, world.peers.ranks) == ((HOME,), (HOME, OTHER))
    world.take_over()
    ((_, used),) = world.peers.serving
    world.there.add(HOME)
    with world.in_use:
        world.tend()
        assert world.serving() == [HOME] and not used.ended.is_set()
    world.tend()
    assert used.ended.is_set() and world.page.snapshot().peers == 1
    assert seen(world.page, Event.PEER_LOST) == seen(world.page, Event.PEER_RETURNED) == 1


def test_a_loss_is_counted_once(world):
    world.start()
    ((_, connector),) = world.peers.serving
    world.peers.lose(connector, "first")
    world.peers.lose(connector, "second")
    assert connector.ended.is_set() and world.serving() == [] and world.peers.last_error == "first"
    assert seen(world.page, Event.PEER_LOST) == 1 and world.page.snapshot().peer_state is PeerState.LOST


def test_a_loss_after_the_close_is_none(world):
    world.start()
    ((_, connector),) = world.peers.serving
    world.peers.close()
    world.peers.lose(connector, "late")
    world.peers.lose_all("late")
    assert seen(world.page, Event.PEER_LOST) == 0 and world.page.snapshot().peer_state is PeerState.NONE


def test_a_takeover_is_told_once_until_a_home_server_serves_again(world, caplog, monkeypatch):
    monkeypatch.setattr("afdpatch.runtime.events._windows", {})
    caplog.set_level(logging.INFO, "afdpatch")
    world.start()
    for _ in range(2):
        world.take_over()
        world.peers.count_takeover(OTHER)
        world.peers.count_takeover(OTHER)
        world.there.add(HOME)
        world.tend()
        assert world.serving() == [HOME]
    assert seen(world.page, Event.TAKEOVER) == 4
    assert caplog.messages.count("AFD event=takeover role=attention rank=0 peer=ffn1") == 2


def test_given_up_is_said_until_a_server_serves(world):
    world.start()
    world.there.clear()
    world.peers.find(time.monotonic() + 0.1)
    world.peers.give_up()
    assert world.peers.given_up and world.page.snapshot().peer_state is PeerState.GIVEN_UP
    world.there.add(OTHER)
    world.tend()
    assert not world.peers.given_up and world.page.snapshot().peer_state is PeerState.CONNECTED


def test_a_connection_that_is_lost_as_soon_as_it_is_there_has_returned_and_is_lost(world):
    class Turns:
        """A lock after which another thread has its turn."""

        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()
            turn()

    def turn():
        if world.peers._connections and losses:
            losses.pop()
            world.peers.lose_all("gone")

    losses = [None]
    world.start()
    world.peers.lose_all("gone")
    world.peers._state_lock = Turns(world.peers._state_lock)
    for _ in range(2):
        world.tend()
    assert not losses and world.serving() == [HOME]
    assert seen(world.page, Event.PEER_LOST) == seen(world.page, Event.PEER_RETURNED) == 2


@pytest.mark.parametrize("who", ["find", "tend"])
def test_a_greeting_keeps_nobody_beyond_its_deadline_and_closing_ends_it(world, who, monkeypatch):
    for limit in ("FIRST_GREETING_S", "TEND_GREETING_S"):
        monkeypatch.setattr(f"afdpatch.runtime.peers.{limit}", 100.0)
    world.start()
    world.there.clear()
    world.silent |= {HOME, OTHER}
    world.peers.lose_all("gone")
    work = world.tend if who == "tend" else lambda: world.peers.find(time.monotonic() + 100)
    thread = threading.Thread(target=work)
    thread.start()
    assert world.waits.wait(20)
    world.peers.find(time.monotonic() + 0.1)
    assert thread.is_alive()
    world.peers.close()
    thread.join(20)
    assert not thread.is_alive() and world.page.snapshot().peers == 0
