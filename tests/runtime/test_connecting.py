"""Greetings between real processes: who is taken, who isn't, and how long that takes."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import torch

from afdpatch.runtime.connectors._memory import address_of
from afdpatch.runtime.connectors.base import (
    AddressInUse,
    ConnectionRefused,
    ConnectTimeout,
    GreetingMismatch,
    PeerLost,
    Unreachable,
)
from afdpatch.runtime.protocol import PROTOCOL_VERSION
from afdpatch.runtime.secret import Handshake
from afdpatch.runtime.status import State

from .helpers import (
    HIDDEN,
    attention_connector,
    connected,
    ffn_connector,
    ffn_process,
    greeting,
    new_address,
    until,
)
from .strangers import challenged, framed, stranger

OTHER_PROCESS = "0123456789abcdef"


@contextlib.contextmanager
def silent_listener(address):
    """Takes connections into its backlog and says nothing; gives a function that waits for one."""
    family, kind = (
        (socket.AF_UNIX, socket.SOCK_SEQPACKET) if isinstance(address, str) else (socket.AF_INET, socket.SOCK_STREAM)
    )
    with socket.socket(family, kind) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(20)
        yield listener.accept


def test_attention_may_start_first(address, page):
    result = []

    def attend():
        with connected(address, timeout_s=60) as attention:
            result.append(attention.hop(torch.ones(1, HIDDEN), 0))

    thread = threading.Thread(target=attend)
    thread.start()
    with ffn_process(address, page):
        thread.join(60)
    assert torch.equal(result[0], torch.full((1, HIDDEN), 2.0))


def test_nobody_there_is_told_at_once(address):
    attention = attention_connector(address)
    with pytest.raises(Unreachable, match="no FFN server answered at"):
        attention.connect(greeting("attention"), time.monotonic() + 100)
    attention.close()


def test_a_server_that_never_answers_ends_at_the_deadline(address):
    with silent_listener(address):
        attention = attention_connector(address)
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"did not answer within \d+\.\d s"):
            attention.connect(greeting("attention"), started + 1)
        assert 1 <= time.monotonic() - started < 20
        attention.close()


def test_a_connector_connects_once(address, ffn):
    with connected(address) as attention, pytest.raises(RuntimeError, match="needs a new connector"):
        attention.connector.connect(greeting("attention"), time.monotonic() + 10)


def test_closing_ends_a_greeting_of_another_thread(address):
    with silent_listener(address) as accepted:
        attention = attention_connector(address)
        caught = []

        def attend():
            try:
                attention.connect(greeting("attention"), time.monotonic() + 100)
            except PeerLost as error:
                caught.append(error)

        thread = threading.Thread(target=attend)
        thread.start()
        taken, _ = accepted()
        attention.close()
        thread.join(10)
        assert not thread.is_alive() and "closed meanwhile" in str(caught[0])
        taken.close()


@contextlib.contextmanager
def mismatching(address, **options):
    """An attention server with another dtype is refused meanwhile, and told so."""
    expected = pytest.raises(GreetingMismatch, match="dtype: ours bfloat16, theirs float32; start both alike")
    with expected as caught, connected(address, greeting={"dtype": "bfloat16"}, **options):
        pass
    assert [mismatch.field for mismatch in caught.value.mismatches] == ["dtype"]
    yield


def test_a_mismatch_of_the_first_peer_ends_both_with_field_and_values(address, ffn, page):
    with mismatching(address):
        ffn.join(10)
    assert ffn.exitcode == 1
    snapshot = page.snapshot()
    assert snapshot.state is State.FAILED and snapshot.peers_refused == 1
    assert "dtype: ours float32, theirs bfloat16; start both alike" in snapshot.last_error


def test_a_mismatch_later_is_refused_and_the_others_are_served(address, ffn, page):
    with connected(address, greeting={"rank": 1}) as other:
        with mismatching(address):
            until(lambda: page.snapshot().peers_refused == 1, "the refusal is counted")
        until(lambda: "dtype: ours float32, theirs bfloat16" in page.snapshot().last_error, "and kept")
        assert other.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2
    until(lambda: page.snapshot().peers == 0, "it has left")
    with mismatching(address):
        until(lambda: page.snapshot().peers_refused == 2, "nobody is there, but somebody was")
    with connected(address) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


@pytest.mark.parametrize("secret", [None, b"sixteen letters!"], ids=["no secret", "secret"])
def test_a_stranger_of_another_version_ends_a_server_without_a_secret_only(address, page, secret):
    hello = Handshake("attention", secret).hello()
    other = framed(address, hello.replace(b'"protocol":%d' % PROTOCOL_VERSION, b'"protocol":99'))
    with ffn_process(address, page, options={"secret": secret}) as process:
        assert b"refused" in stranger(address, other).recv(65536)
        if secret is None:
            process.join(10)
            assert (
                process.exitcode == 1 and f"protocol: ours {PROTOCOL_VERSION}, theirs 99" in page.snapshot().last_error
            )
        else:
            with connected(address, secret=secret) as attention:
                assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


def test_who_has_another_secret_ends_nobody_else(address, page):
    with ffn_process(address, page, options={"secret": b"sixteen letters!"}):
        sock, handshake = challenged(address, b"sixteen letters!")
        handshake._secret = b"sixteen let{ers!"
        sealed = handshake.seal(greeting("attention", dtype="bfloat16").encode())
        socket.send_fds(sock, [framed(address, sealed)], [])
        assert b"differ" in sock.recv(65536)
        with connected(address, secret=b"sixteen letters!") as attention:
            assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


def test_a_taken_address_is_an_error_that_says_what_to_do(address, ffn):
    with pytest.raises(AddressInUse, match="choose another port"):
        ffn_connector(address).listen(greeting("ffn"))


@pytest.mark.parametrize("address", ["shm"], indirect=True)
def test_long_hosts_get_a_short_address(address):
    addresses = {address_of("h" * length, 1239, 0) for length in (20, 200, 201)}
    assert len(addresses) == 3
    for address in addresses:
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(address)


def test_two_attention_ranks_are_served_and_another_process_with_the_rank_of_one_is_refused(address, ffn, page):
    with connected(address) as first, connected(address, greeting={"rank": 1}) as second:
        second.hop(torch.ones(1, HIDDEN), 0)  # a rank that has been silent for long may be free soon
        with (
            pytest.raises(ConnectionRefused, match="rank 1 is connected already") as caught,
            connected(address, greeting={"rank": 1, "instance": OTHER_PROCESS}),
        ):
            pass
        assert not caught.value.retry
        for _ in range(50):
            assert first.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2
            assert second.hop(torch.full((2, HIDDEN), 3.0), 0)[0, 0] == 6
        until(lambda: page.snapshot().peers == 2 and page.snapshot().hops == 101, "both counted")
        assert page.snapshot().peers_refused == 1
    until(lambda: page.snapshot().peers == 0, "both have left")


@pytest.mark.parametrize("address", ["shm"], indirect=True)
def test_a_process_of_another_user_is_refused(address, page):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with ffn_process(address, page):
        pid = os.fork()
        if not pid:
            try:
                os.setuid(65534)
                sock = stranger(address)
                os._exit(42 if b"runs as user 65534" in sock.recv(65536) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        until(lambda: page.snapshot().peers_refused == 1, "the refusal is counted")


@pytest.mark.parametrize("address", ["shm"], indirect=True)
def test_a_listener_of_another_user_is_refused(address):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(address)
            listener.listen()
            os.write(tell, b"!")
            listener.accept()[0].recv(65536)
        finally:
            os._exit(0)  # never on as a second pytest
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"!"
        with pytest.raises(ConnectionRefused, match="runs as user 65534, expected 0"), connected(address):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


# Loading


def test_a_loading_server_greets_and_its_hops_wait(address, page):
    connector = ffn_connector(address, page=page)
    connector.listen(greeting("ffn"))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            for hop in connector.receive(0.05):
                connector.reply(hop, hop.hidden + 1)

    server = threading.Thread(target=serve)
    server.start()
    results = []
    with connected(address, hop_timeout_s=30) as attention:
        assert not attention.connector.serving
        client = threading.Thread(target=lambda: results.append(attention.hop(torch.ones(1, HIDDEN), 0)))
        client.start()
        until(lambda: [peer.waiting for peer in connector.peers()] == [1], "the hop waits")
        assert client.is_alive() and not results
        connector.set_serving()
        client.join(10)
        assert torch.equal(results[0], torch.full((1, HIDDEN), 2.0)) and attention.connector.serving
        with connected(address, greeting={"rank": 1}) as late:
            late.wait_ready(time.monotonic())
    stop.set()
    server.join()
    connector.close()


def test_wait_ready_waits_for_the_weights_until_its_deadline(address, page):
    with ffn_process(address, page, serve=False), connected(address) as attention:
        with pytest.raises(ConnectTimeout, match="still loading"):
            attention.wait_ready(time.monotonic() + 0.1)
        assert attention.peer_alive()


def test_a_server_that_dies_while_loading_ends_wait_ready(address, page):
    with ffn_process(address, page, serve=False) as process, connected(address) as attention:
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(PeerLost, match="while it loaded"):
            attention.wait_ready(time.monotonic() + 30)
        assert not attention.peer_alive()


def test_closing_ends_the_wait_for_a_name(monkeypatch):
    asked, answers = threading.Event(), threading.Event()

    def resolver(*args, **kwargs):
        asked.set()
        answers.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    connector = attention_connector(("ffn.example", 1))
    caught = []

    def connect():
        try:
            connector.connect(greeting("attention"), time.monotonic() + 60)
        except PeerLost as error:
            caught.append(error)

    threads = [threading.Thread(target=connect), threading.Thread(target=connector.close)]
    threads[0].start()
    assert asked.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    ended = [not thread.is_alive() for thread in threads]
    answers.set()
    for thread in threads:
        thread.join(20)
    assert ended == [True, True] and "closed" in str(caught[0])


def test_peers_may_be_silent_for_longer_than_the_kernel_counts(page):
    address = new_address("tcp")
    options = {"peer_timeout_s": 1e7}
    with ffn_process(address, page, options=options), connected(address, **options) as attention:
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
