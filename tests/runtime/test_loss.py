"""Peers that die, stop, or answer too late, over each transport."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

from afdpatch.runtime.connectors.base import HopTimeout, PeerLost
from afdpatch.runtime.protocol import Header, Kind, Layout

from .helpers import HANGING_LAYER, HIDDEN, connected, descriptors, greeting, strike, until
from .strangers import good_hop, impostor, raw_peer


def test_a_killed_server_ends_a_hop_at_once(address, ffn):
    with connected(address, hop_timeout_s=100) as attention:
        threading.Timer(0.2, ffn.kill).start()
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"layer 2, sequence 1.*after \d+\.\d+ s.*restart it") as caught:
            attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)
        assert time.monotonic() - started < 20 and not isinstance(caught.value, HopTimeout)
        assert not attention.peer_alive()
        with pytest.raises(PeerLost, match="no connection"):
            attention.hop(torch.ones(1, HIDDEN), 0)


def test_a_stopped_server_ends_a_hop_at_the_deadline_and_its_late_answer_is_never_taken(address, ffn, page):
    with connected(address, hop_timeout_s=2.0) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
        strike(ffn.pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(HopTimeout, match=r"sequence 2.*did not answer in time after \d+\.\d+ s"):
                attention.hop(torch.full((1, HIDDEN), 7.0), 0)
            assert 2 <= time.monotonic() - started < 20
        finally:
            os.kill(ffn.pid, signal.SIGCONT)
        with pytest.raises(PeerLost, match="no connection"):
            attention.hop(torch.ones(1, HIDDEN), 0)
    # The same rank comes back, and sends the hop again under its number.
    with connected(address) as attention:
        attention.sequence = 1
        assert torch.equal(attention.hop(torch.full((1, HIDDEN), 8.0), 0), torch.full((1, HIDDEN), 16.0))
        assert page.snapshot().peers == 1


def test_closing_at_any_moment_of_a_hop_gives_its_result_or_a_named_error(address, ffn):
    """Close from within the hop's own thread, as a signal handler does, before each line that a hop runs."""
    hidden = torch.ones(2, HIDDEN)
    for moment in range(1000):
        left = moment
        with connected(address, spin_us=0) as attention:

            def at_a_line(frame, event, argument, attention=attention):
                nonlocal left
                if event == "line":
                    left -= 1
                    if left < 0:
                        sys.settrace(None)
                        attention.connector.close()
                return at_a_line if "connectors" in frame.f_code.co_filename else None

            sys.settrace(at_a_line)
            try:
                assert torch.equal(attention.hop(hidden, 0), hidden * 2)
            except PeerLost as error:
                assert "closed" in str(error)
            finally:
                sys.settrace(None)
        if left >= 0:
            break
    assert 30 < moment < 900, "the hop was closed at each of its lines"


def test_a_reply_with_an_old_number_breaks_the_connection(address):
    with impostor(address) as (listener, read, write):

        def answer_wrongly():
            sock = listener()
            hop = Header.unpack(read(sock))
            offset = Layout.of(greeting("attention")).f2a_offset(0) if isinstance(address, str) else 0
            write(sock, hop._replace(kind=Kind.REPLY, sequence=hop.sequence - 1, offset=offset).pack())
            until(lambda: not sock.recv(65536), "the peer closes")

        server = threading.Thread(target=answer_wrongly)
        server.start()
        with connected(address) as attention, pytest.raises(PeerLost, match=r"sequence 0.*expected REPLY, sequence 1"):
            attention.hop(torch.ones(1, HIDDEN), 0)
        server.join(10)
        assert not server.is_alive()


def test_an_interrupted_hop_leaves_no_connection(address, ffn):
    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with connected(address) as attention:
            with pytest.raises(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 2)  # the hop has begun by then
                attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)
            assert not attention.peer_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_a_hop_of_another_thread(address, ffn):
    with connected(address) as attention:
        threading.Timer(0.2, attention.close).start()
        started = time.monotonic()
        with pytest.raises(PeerLost):
            attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)
        assert time.monotonic() - started < 30  # not at its deadline


def test_a_peer_that_dies_frees_its_mapping(address, ffn, page):
    def mapped():
        with open(f"/proc/{ffn.pid}/maps") as lines:
            return sum("afdpatch-" in line and "status" not in line for line in lines)

    with connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    until(lambda: page.snapshot().peers == 0 and mapped() == 0, "the threads have what they need")
    idle = descriptors(ffn.pid)
    pid = os.fork()
    if not pid:
        try:
            with connected(address) as attention:
                attention.hop(torch.ones(1, HIDDEN), 0)
                signal.pause()
        finally:
            os._exit(1)  # never on as a second pytest
    try:
        until(lambda: page.snapshot().hops == 2, "the peer has sent a hop")
        assert descriptors(ffn.pid) != idle
        assert mapped() == (1 if isinstance(address, str) else 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    until(lambda: page.snapshot().peers == 0 and mapped() == 0, "the mapping is gone")
    until(lambda: descriptors(ffn.pid) == idle, "no descriptor is left")


def test_a_peer_that_dies_in_its_hop_does_no_harm(address, ffn, page):
    sock = raw_peer(address, good_hop(address))
    sock.close()
    with connected(address, greeting={"rank": 1}) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2
    until(lambda: page.snapshot().peers == 0, "both are gone")
