"""A signal handler may close a route at any moment: at each line of the thread that it interrupts."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import afdpatch.runtime
from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import NoFfnServer, PeerLost
from afdpatch.runtime.route import Route
from afdpatch.runtime.snapshot import PeerState
from afdpatch.runtime.status import StatusPage

from .helpers import attention_connector, descriptors, new_address
from .routes import ONE, said, servers

TRACED = (str(Path(afdpatch.runtime.__file__).parent), threading.__file__)


class Interruption:
    """Calls a handler before the line of this number that a thread runs of the runtime, or of what it waits with."""

    def __init__(self, number, handler):
        self.number = number
        self.handler = handler
        self.lines = 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.handler()
        return self

    def during(self, work):
        """Whether it came while a thread of its own did the work, and what that raised."""
        caught = []

        def run():
            sys.settrace(self)
            try:
                work()
            except BaseException as error:
                caught.append(error)
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), f"closing at line {self.number} of what ran keeps it for ever"
        return self.lines >= self.number, caught


class World:
    """Routes of one rank to a home server and another block's, each of which this rank may not find for a while."""

    def __init__(self, ffn, transport):
        self.ffn = ffn
        self.nobody = new_address(transport)
        self.gone = set()
        self.config = AfdConfig.parse({"num_attention_ranks": 2, "num_ffn_ranks": 2})
        self.page = StatusPage.create("attention")

    def make(self, rank):
        return attention_connector(self.nobody if rank in self.gone else self.ffn.addresses[rank], spin_us=0)

    def route(self):
        self.gone.clear()
        return Route(self.config, 0, self.page, self.make)

    def connect(self, route):
        route.connect(said(self.ffn))
        route.wait_ready()

    def lose(self, route, *ranks):
        self.gone.update(ranks)
        for _, connector in route._peers.serving:
            connector._sock.shutdown(2)

    def before(self, what, route):
        if what != "connect":
            self.connect(route)
        if what == "takeover":
            self.lose(route, 0)
        if what == "search":
            self.lose(route, 0, 1)
        if what == "return":
            self.lose(route, 0)
            route.hop(ONE, 0)
            self.gone.clear()

    def during(self, what, route):
        if what == "connect":
            self.connect(route)
        elif what == "takeover":
            assert torch.equal(route.hop(ONE, 0), ONE * 2)
        elif what == "search":
            route.begin_step(time.monotonic() + 0.02)
            with pytest.raises(NoFfnServer):
                route.hop(ONE, 0)
        elif what == "return":
            route.tend()
        else:
            route.close()


@pytest.mark.parametrize("what", ["connect", "takeover", "search", "return", "close"])
def test_a_signal_handler_may_close_the_route_at_any_line(transport, what):
    with servers(transport, 2) as ffn:
        world = World(ffn, transport)
        route = world.route()
        world.connect(route)  # what is opened at its first use
        route.close()
        gc.collect()  # what earlier tests left
        before = descriptors(os.getpid())
        number, came = 0, True
        while came:
            number += 1
            route = world.route()
            world.before(what, route)
            came, caught = Interruption(number, route.close).during(lambda route=route: world.during(what, route))
            if caught and not isinstance(caught[0], PeerLost):
                raise AssertionError(f"closing at line {number} of what ran") from caught[0]
            if came:
                snapshot = world.page.snapshot()
                assert (snapshot.peers, snapshot.peer_state) == (0, PeerState.NONE), f"at line {number}"
            route.close()
        assert number > 20
        gc.collect()  # of the errors, whose frames hold what they had
        assert set(descriptors(os.getpid())) <= set(before)
