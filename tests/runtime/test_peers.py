"""What an FFN server does with its peers: claims of a rank, silence, draining, turns."""

import contextlib
import errno
import select
import threading
import time

import pytest
import torch

from afdpatch.runtime.connectors.base import ConnectionRefused, InvalidHop, PeerLost
from afdpatch.runtime.events import Event

from .helpers import HIDDEN, connected, ffn_connector, greeting, new_address, until
from .strangers import good_hop, raw_peer, stranger

OTHER_PROCESS = "0123456789abcdef"
ONE = torch.ones(1, HIDDEN)


@contextlib.contextmanager
def listening(address, page, **options):
    connector = ffn_connector(address, page=page, **options)
    connector.listen(greeting("ffn"))
    connector.set_serving()
    try:
        yield connector
    finally:
        connector.close()


@contextlib.contextmanager
def turning(connector):
    """``receive`` in a thread; every hop is answered with itself."""
    stop = threading.Event()

    def turn():
        while not stop.is_set():
            for hop in connector.receive(0.05):
                connector.reply(hop, hop.hidden)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


def collect(connector):
    """Read what has arrived without giving it out; how many hops wait."""
    for fd, event in connector._wait(0.01):
        peer = connector._peers.get(fd)
        if peer is not None:
            connector._peer_event(peer, event)
        else:
            connector._other_event(fd)
    return connector.waiting


def test_a_process_that_connects_again_takes_the_place_of_its_old_connection(address, page):
    with listening(address, page) as ffn, turning(ffn), connected(address) as old, connected(address) as new:
        assert torch.equal(new.hop(ONE, 0), ONE)
        until(lambda: not old.peer_alive(), "the old one is closed")
        with pytest.raises(PeerLost):
            old.hop(ONE, 0)
        assert page.snapshot().peers == 1


def test_the_rank_of_a_quiet_peer_may_be_free_soon(address, page):
    with listening(address, page) as ffn, turning(ffn), connected(address):
        until(lambda: page.snapshot().peers == 1, "it is a peer")
        (peer,) = ffn._peers.values()
        peer.heard_ns -= 4_000_000_000
        expected = pytest.raises(ConnectionRefused, match="connected already")
        with expected as caught, connected(address, greeting={"instance": OTHER_PROCESS}):
            pass
        assert caught.value.retry


def test_a_silent_peer_is_dropped_and_one_that_waits_for_its_answer_is_not(address, page):
    with listening(address, page, peer_timeout_s=2) as ffn:
        with turning(ffn):
            silent = raw_peer(address)
            until(lambda: page.snapshot().events[Event.PEER_LOST] == 1, "dropped")
            assert page.snapshot().peers == 0
            waiting = raw_peer(address)
        waiting.sendall(good_hop(address))
        hops = []
        until(lambda: hops.extend(ffn.receive(0.05)) or hops, "the hop has arrived")
        end = time.monotonic() + 5
        until(lambda: ffn.receive(0.05) or time.monotonic() > end, "longer than the time for silence")
        assert page.snapshot().peers == 1
        ffn.reply(hops[0], hops[0].hidden)
        assert waiting.recv(4096)
        silent.close()
        waiting.close()


def test_hops_of_one_layer_come_together_and_nobody_is_left_behind(address, page):
    wide = {"num_attention_ranks": 4}
    with contextlib.ExitStack() as stack:
        ffn = stack.enter_context(contextlib.closing(ffn_connector(address, page=page)))
        ffn.listen(greeting("ffn", **wide))
        ffn.set_serving()
        with turning(ffn):
            socks = [stack.enter_context(raw_peer(address, rank=rank, **wide)) for rank in range(4)]
        for rank, layer in enumerate((0, 3, 0, 3)):
            socks[rank].sendall(good_hop(address, layer=layer))
            until(lambda rank=rank: collect(ffn) == rank + 1, "it has arrived")
        first = ffn.receive(1)
        assert [(hop.rank, hop.header.layer) for hop in first] == [(0, 0), (2, 0)] and ffn.waiting == 2
        for hop in first:
            ffn.reply(hop, hop.hidden)
        # Those that were answered come again at once, and still it is the others' turn.
        for rank in (0, 2):
            socks[rank].sendall(good_hop(address, layer=0, sequence=2))
            until(lambda rank=rank: collect(ffn) == (3 if rank == 0 else 4), "it has arrived")
        assert [(hop.rank, hop.header.layer) for hop in ffn.receive(1)] == [(1, 3), (3, 3)]
        assert [peer.waiting for peer in ffn.peers()] == [1, 1, 1, 1]


def test_a_draining_server_answers_what_has_come_says_goodbye_and_takes_nobody(address, page):
    with listening(address, page) as ffn:
        with turning(ffn):
            idle, busy = raw_peer(address), raw_peer(address, rank=1)
        busy.sendall(good_hop(address))
        until(lambda: collect(ffn) == 1, "it has arrived")
        ffn.drain()
        assert ffn.draining
        (hop,) = ffn.receive(1)
        assert page.snapshot().peers == 1
        ffn.reply(hop, hop.hidden)
        with turning(ffn):
            until(lambda: page.snapshot().peers == 0, "all have gone")
            assert idle.recv(4096)[6] == 4 and idle.recv(4096) == b""
            answer = b""
            while part := busy.recv(4096):
                answer += part
            assert answer[6] == 2 and answer[-64:][6] == 4
            with pytest.raises(ConnectionRefused, match="draining") as caught, connected(address):
                pass
            assert caught.value.retry
            ffn.resume()
            with connected(address) as attention:
                assert torch.equal(attention.hop(ONE, 0), ONE)
        assert page.snapshot().events[Event.PEER_LOST] == 0
        idle.close()
        busy.close()


def test_a_draining_server_waits_until_its_answer_has_gone_out(page):
    wide = {"hidden_size": 4096, "max_rows": 4096}
    address = new_address("tcp")
    with contextlib.closing(ffn_connector(address, page=page)) as ffn:
        ffn.listen(greeting("ffn", **wide))
        ffn.set_serving()
        with turning(ffn):
            sock = raw_peer(address, **wide)
            sock.sendall(good_hop(address, rows=4096, hidden=4096, nbytes=1 << 26))  # 64 MiB
            until(lambda: page.snapshot().peers == 1 and ffn.peers()[0].waiting == 0 and sent(ffn), "it is answered")
            ffn.drain()
            answer = 0
            while part := sock.recv(1 << 20):
                answer += len(part)
            assert answer == 64 + (1 << 26) + 64
        sock.close()


def sent(ffn):
    """Whether the only peer's answer is in parts."""
    return any(peer.interest & select.POLLOUT for peer in ffn._peers.values())


def test_no_free_descriptor_is_no_end(address, page, monkeypatch):
    with listening(address, page) as ffn, turning(ffn), connected(address) as attention:

        class Full:
            def fileno(self):
                return listener.fileno()

            def accept(self):
                raise OSError(errno.EMFILE, "Too many open files")

            def close(self):
                listener.close()

        listener = ffn._listener
        monkeypatch.setattr(ffn, "_listener", Full())
        sock = stranger(address)
        until(lambda: page.snapshot().peers_refused > 0, "refused")
        assert torch.equal(attention.hop(ONE, 0), ONE)
        sock.close()
        monkeypatch.setattr(ffn, "_listener", listener)


def test_the_answer_of_a_dropped_peer_goes_nowhere(address, page):
    with listening(address, page) as ffn:
        with turning(ffn):
            sock = raw_peer(address)
        sock.sendall(good_hop(address))
        hops = []
        until(lambda: hops.extend(ffn.receive(0.05)) or hops, "the hop has arrived")
        sock.close()
        until(lambda: ffn.receive(0.05) or page.snapshot().peers == 0, "it has gone")
        with turning(ffn), connected(address) as attention:
            ffn.reply(hops[0], hops[0].hidden)
            ffn.reply_error(hops[0], "no")
            assert torch.equal(attention.hop(ONE, 0), ONE)


def test_a_result_of_another_shape_is_refused_before_it_is_sent(address, page):
    with listening(address, page) as ffn:
        with turning(ffn):
            sock = raw_peer(address)
        sock.sendall(good_hop(address))
        hops = []
        until(lambda: hops.extend(ffn.receive(0.05)) or hops, "the hop has arrived")
        with pytest.raises(InvalidHop, match=r"expected .*\[1, 64\]"):
            ffn.reply(hops[0], torch.ones(2, HIDDEN))
        ffn.reply(hops[0], ONE)
        assert sock.recv(64)[6] == 2
        sock.close()
