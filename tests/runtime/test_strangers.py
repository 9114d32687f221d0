"""What isn't an attention server, or not a good one: refused or dropped, counted, and no harm to the others."""

import contextlib
import os
import socket
import threading

import pytest
import torch

from afdpatch.runtime.events import Event
from afdpatch.runtime.protocol import HEADER_BYTES, Header, Kind, Layout, decode_answer

from .helpers import HIDDEN, connected, descriptors, ffn_process, greeting, new_address, until
from .strangers import challenged, framed, good_hop, memfd, raw_peer, stranger, unframed


@pytest.fixture
def tcp_address():
    return new_address("tcp")


@pytest.mark.parametrize("challenge", [False, True], ids=["as hello", "as greeting"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("garbage", b"\x00\xff" * 40),
        ("another JSON", b'{"a": 1}'),
        ("an oversized message", b"x" * 70_000),
        ("nested JSON", b"[" * 60_000),
        ("a bare greeting", greeting("attention").encode()),
        ("a greeting with a long tail", greeting("attention").encode().ljust(70_000)),
    ],
)
def test_a_stranger_is_refused_and_counted(address, ffn, page, what, message, challenge):
    if challenge:
        sock, _ = challenged(address)
        send = sock.sendall
    else:
        sock = stranger(address)
        send = sock.sendall
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send(framed(address, message))
        answer = sock.recv(65536)
        assert b"refused" in answer, what
        assert sock.recv(65536) == b""
    until(lambda: page.snapshot().peers_refused == 1, "counted")
    with connected(address) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


def test_bytes_that_are_no_message_are_refused(tcp_address, page):
    with ffn_process(tcp_address, page):
        sock = stranger(tcp_address, b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"refused" in sock.recv(65536)
        until(lambda: page.snapshot().peers_refused == 1, "counted")
        assert "AFDt" in page.snapshot().last_error


@pytest.mark.parametrize("case", ["unsealed", "small", "a socket", "two"])
@pytest.mark.parametrize("address", ["shm"], indirect=True)
def test_a_memfd_that_could_hurt_is_refused_and_closed(address, ffn, page, case):
    layout = Layout.of(greeting("attention"))
    with connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    until(lambda: page.snapshot().peers == 0, "its threads have what they need")
    idle = descriptors(ffn.pid)
    fds = {
        "unsealed": lambda: [memfd(layout, seals=0)],
        "small": lambda: [memfd(layout, size=4096)],
        "a socket": lambda: [socket.socket(socket.AF_UNIX).detach()],
        "two": lambda: [memfd(layout), memfd(layout)],
    }[case]()
    sock, handshake = challenged(address)
    socket.send_fds(sock, [handshake.seal(greeting("attention").encode())], fds)
    for fd in fds:
        os.close(fd)
    assert b"refused" in sock.recv(65536)
    until(lambda: page.snapshot().peers_refused == 1, "counted")
    assert page.snapshot().peers == 0
    until(lambda: descriptors(ffn.pid) == idle, "its descriptors are closed")


def test_a_silent_stranger_is_dropped_and_holds_nobody_up(address, page):
    with ffn_process(address, page, options={"greeting_timeout_s": 2.0}):
        sock = stranger(address)
        with connected(address) as attention:
            attention.hop(torch.ones(1, HIDDEN), 0)
        refusal = decode_answer(unframed(address, sock.recv(65536)))
        assert "sent no greeting within 2 s" in refusal.reason and refusal.retry  # it may only have been slow
        assert page.snapshot().peers_refused == 1


def test_more_waiting_strangers_than_the_limit_are_refused(address, page):
    with ffn_process(address, page, options={"greeting_timeout_s": 2.0}):
        crowd = [stranger(address) for _ in range(40)]
        until(lambda: page.snapshot().peers_refused >= 40, "all are dropped")
        assert len(crowd) == 40
        with connected(address) as attention:
            assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


@pytest.mark.parametrize("case", ["short", "garbage", "long", "too many rows", "replayed", "reordered"])
def test_a_peer_that_breaks_the_protocol_is_dropped_and_counted(address, ffn, page, case):
    first = good_hop(address, sequence=5)
    second = {
        "short": good_hop(address, sequence=6)[:20] + (b"" if isinstance(address, str) else b"x" * 44),
        "garbage": b"x" * HEADER_BYTES,
        "long": good_hop(address, sequence=6) + b"x" * HEADER_BYTES,
        "too many rows": good_hop(address, sequence=6, rows=99, nbytes=99 * HIDDEN * 4),
        "replayed": first,
        "reordered": good_hop(address, sequence=4),
    }[case]
    with connected(address, greeting={"rank": 1}) as good:
        sock = raw_peer(address)
        sock.sendall(first)
        assert sock.recv(65536)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(second)
            while sock.recv(65536):
                pass
        until(lambda: page.snapshot().peers == 1, "dropped")
        assert page.snapshot().events[Event.DROPPED] == 1 and page.snapshot().peers_refused == 0
        assert good.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


def test_a_second_hop_before_the_answer_is_dropped_and_counted(address, page):
    with ffn_process(address, page, serve=False):
        sock = raw_peer(address, good_hop(address, sequence=1), good_hop(address, sequence=2))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(65536) == b""
        until(lambda: page.snapshot().peers == 0, "dropped")
        assert page.snapshot().events[Event.DROPPED] == 1 and "no second hop" in page.snapshot().last_error


def test_a_repeated_hop_is_taken_on_a_new_connection(address, ffn, page):
    for _ in range(2):
        sock = raw_peer(address, good_hop(address, sequence=5))
        assert Header.unpack(sock.recv(HEADER_BYTES)).sequence == 5
        sock.close()
        until(lambda: page.snapshot().peers == 0, "gone")
    assert page.snapshot().hops == 2 and page.snapshot().events[Event.DROPPED] == 0


def test_a_peer_that_never_reads_its_answers_holds_nobody_up(address, page):
    wide = {"hidden_size": 4096, "max_rows": 2048}
    with ffn_process(address, page, options={"peer_timeout_s": 5.0}, **wide):
        sock = raw_peer(address, **wide)
        rows = 1 if isinstance(address, str) else 2048  # over shm the headers alone fill the socket
        head = Header(Kind.HOP, 3, 1, 0, 0, 0, rows, 4096, 0, rows * 4096 * 4)

        ended = []

        def flood():
            try:
                for sequence in range(1, 100_000):
                    sock.sendall(head._replace(sequence=sequence).pack())
                    if not isinstance(address, str):
                        sock.sendall(bytes(head.nbytes))
            except OSError as error:
                ended.append(error)

        thread = threading.Thread(target=flood)
        thread.start()
        with connected(address, greeting={"rank": 1, **wide}) as good:
            # Hops go on until the other one is dropped: a rank that is silent for five seconds would be dropped.

            def dropped():
                assert good.hop(torch.ones(1, 4096), 0)[0, 0] == 2
                return not thread.is_alive()

            for _ in range(20):
                dropped()
            until(dropped, "the flood ends", 120)
            assert ended and isinstance(ended[0], ConnectionError)  # dropped for its flood, not later for its silence
            until(lambda: dropped() and page.snapshot().peers == 1, "one peer is left")
        thread.join()
