"""Memory and descriptors over many hops and many connections."""

import contextlib
import gc
import os
import threading
import time

import pytest
import torch

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.events import Event
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import StatusPage

from .helpers import (
    HIDDEN,
    attention_connector,
    connected,
    descriptors,
    ffn_connector,
    greeting,
    until,
)


@pytest.mark.parametrize("hops", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_descriptors_and_memory_stay_flat(address, ffn, hops):
    def used(pid):
        with open(f"/proc/{pid}/statm") as statm, open(f"/proc/{pid}/maps") as maps:
            shared = [line for line in maps if "/memfd:" in line or "/dev/shm/" in line]
            return int(statm.read().split()[1]) * 4096, (len(descriptors(pid)), len(shared))

    with connected(address) as attention:
        hidden = torch.ones(4, HIDDEN)
        for _ in range(2000):
            attention.hop(hidden, 0)
        gc.collect()  # what earlier tests left
        before = [used(pid) for pid in (os.getpid(), ffn.pid)]
        for _ in range(hops):
            attention.hop(hidden, 0)
        after = [used(pid) for pid in (os.getpid(), ffn.pid)]
    for (memory, held), (memory_later, held_later) in zip(before, after, strict=True):
        print(f"{hops} hops: memory grew by {(memory_later - memory) / 1024:.0f} KiB; descriptors, maps: {held_later}")
        assert all(later <= earlier for earlier, later in zip(held, held_later, strict=True))
        assert memory_later - memory < 4 << 20


@contextlib.contextmanager
def answering(ffn):
    """``receive`` in a thread; every hop is answered with its double."""
    stop = threading.Event()

    def turn():
        while not stop.is_set():
            for hop in ffn.receive(0.0):
                ffn.reply(hop, hop.hidden * 2)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def test_an_hour_without_a_hop(address, page, monkeypatch):
    """The clock of both ends is simulated, half a second at each look; sockets and messages are real."""
    now = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0] / 1e9)
    own = StatusPage.create("attention")
    ffn = ffn_connector(address, page=page)
    ffn.listen(greeting("ffn"))
    ffn.set_serving()
    config = AfdConfig.parse({"connector_extra_config": {"hop_timeout_s": 60, "connect_timeout_s": 600}})
    route = Route(config, 0, own, lambda rank: attention_connector(address))
    try:
        with answering(ffn):
            route.connect(greeting("attention"))
            route.wait_ready()

        def heard():
            assert ffn.receive(0.0) == []
            return [peer.heard_ns for peer in ffn.peers()] == now

        for _ in range(7200):
            now[0] += 500_000_000
            route.tend()
            until(heard, "the sign of life")
        with answering(ffn):
            assert torch.equal(route.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
    finally:
        route.close()
        ffn.close()
    assert own.snapshot().events[Event.PEER_LOST] == 0
    assert page.snapshot().events[Event.REFUSED] == 0


def test_connecting_again_and_again_leaks_nothing(address, ffn, page):
    def used():
        return [len(descriptors(pid)) for pid in (os.getpid(), ffn.pid)]

    with connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    until(lambda: page.snapshot().peers == 0, "it has left")
    gc.collect()  # what earlier tests left
    before = used()
    for _ in range(100):
        with connected(address) as attention:
            attention.hop(torch.ones(1, HIDDEN), 0)
    until(
        lambda: page.snapshot().peers == 0 and max(map(int.__sub__, used(), before)) <= 0, "all descriptors are closed"
    )


def test_no_descriptor_is_inherited(address, ffn):
    def inheritable(pid):
        found = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                with open(f"/proc/{pid}/fdinfo/{fd}") as text:
                    flags = int(text.read().split("flags:")[1].split()[0], 8)
            except OSError:
                continue  # the listing's own descriptor
            if not flags & os.O_CLOEXEC and link.startswith(("/memfd:", "socket:", "anon_inode:[event")):
                found.add(link)
        return found

    before = inheritable(os.getpid())
    with connected(address):
        assert inheritable(os.getpid()) <= before
        assert not [link for link in inheritable(ffn.pid) if "afdpatch-hop" in link or "event" in link]
