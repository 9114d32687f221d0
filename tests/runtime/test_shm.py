"""The two sides of the shm connector over real sockets, the FFN side in a process of its own."""

import fcntl
import gc
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
    FfnError,
    GreetingMismatch,
    HopTimeout,
    InvalidHop,
    PeerLost,
)
from afdpatch.runtime.connectors.shm import ShmAttentionConnector, ShmFfnConnector
from afdpatch.runtime.protocol import HEADER_BYTES, Header, Kind, Layout, decode_answer
from afdpatch.runtime.status import StatusPage

from .helpers import FAILING_LAYER, HANGING_LAYER, HIDDEN, connected, ffn_process, greeting, new_address, until


@pytest.fixture
def address():
    return new_address()


@pytest.fixture
def page():
    return StatusPage.create("ffn")


@pytest.fixture
def ffn(address, page):
    with ffn_process(address, page) as process:
        yield process


def memfd(layout, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, size=None):
    fd = os.memfd_create("afdpatch-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.total_bytes if size is None else size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def stranger(address, *messages, fds=()):
    """A raw client of the same user; sends the first message with the descriptors, then the others."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    sock.connect(address)
    for number, message in enumerate(messages):
        socket.send_fds(sock, [message], list(fds) if number == 0 else [])
    return sock


def raw_peer(address, *messages, **changes):
    """A stranger that greets as it should, then sends what it likes."""
    ours = greeting("attention", **changes)
    fd = memfd(Layout.of(ours))
    sock = stranger(address, ours.encode(), fds=[fd])
    os.close(fd)
    answer = decode_answer(sock.recv(65536))
    assert answer.role == "ffn"
    for message in messages:
        sock.send(message)
    return sock


# Hops


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_hop_gives_what_the_ffn_computes(address, page, dtype):
    with (
        ffn_process(address, page, dtype=dtype),
        connected(address, greeting={"dtype": dtype}) as attention,
    ):
        for rows in (1, 3, 32):
            for micro_batch in (0, 1):
                hidden = torch.randn(rows, HIDDEN).to(getattr(torch, dtype))
                assert torch.equal(attention.hop(hidden, 0, micro_batch), hidden * 2)


def test_a_result_stays_when_the_next_hop_comes(address, ffn):
    with connected(address) as attention:
        first = attention.hop(torch.ones(2, HIDDEN), 0)
        attention.hop(torch.zeros(2, HIDDEN), 0)
        assert torch.equal(first, torch.full((2, HIDDEN), 2.0))


def test_strides_dont_matter(address, ffn):
    with connected(address) as attention:
        hidden = torch.randn(HIDDEN, 5).t()
        assert not hidden.is_contiguous()
        assert torch.equal(attention.hop(hidden, 0), hidden * 2)


def test_hops_work_in_and_out_of_inference_mode(address, ffn):
    attention = ShmAttentionConnector(address)
    with torch.inference_mode():
        attention.connect(greeting("attention"))
        attention.hop(torch.ones(1, HIDDEN), 0)
    assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
    attention.close()


def test_no_rows_no_hop(address, ffn, page):
    with connected(address) as attention:
        assert attention.hop(torch.empty(0, HIDDEN), 0).shape == (0, HIDDEN)
        attention.hop(torch.ones(1, HIDDEN), 0)
        until(lambda: page.snapshot().hops == 1, "one hop counted")


@pytest.mark.parametrize(
    ("hidden", "layer", "micro_batch", "expected"),
    [
        (torch.ones(33, HIDDEN), 0, 0, r"\[33, 64\], expected \[0..32, 64\]"),
        (torch.ones(1, HIDDEN + 1), 0, 0, r"\[1, 65\], expected"),
        (torch.ones(HIDDEN), 0, 0, r"\[64\], expected"),
        (torch.ones(1, HIDDEN, dtype=torch.bfloat16), 0, 0, "bfloat16 on cpu, expected torch.float32"),
        (torch.ones(1, HIDDEN, device="meta"), 0, 0, "on meta, expected torch.float32 on cpu"),
        (torch.ones(1, HIDDEN), 4, 0, "expected a layer of the greeting"),
        (torch.ones(1, HIDDEN), 0, 2, "micro-batch 2, expected 0..1"),
    ],
)
def test_a_wrong_hop_is_refused_before_anything_is_sent(address, ffn, page, hidden, layer, micro_batch, expected):
    with connected(address) as attention:
        with pytest.raises(InvalidHop, match=expected):
            attention.hop(hidden, layer, micro_batch)
        attention.hop(torch.ones(1, HIDDEN), 0)
        until(lambda: page.snapshot().hops == 1, "only the good hop arrived")
        assert page.snapshot().errors == 0


def test_a_failed_computation_is_an_error_with_its_text_and_the_next_hop_works(address, ffn, page):
    ours = StatusPage.create("attention")
    with connected(address, page=ours) as attention:
        with pytest.raises(FfnError, match=r"layer 1, sequence 1.*no such expert"):
            attention.hop(torch.ones(1, HIDDEN), FAILING_LAYER)
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
    assert page.snapshot().errors == 1 and "no such expert" in page.snapshot().last_error
    assert ours.snapshot().errors == 1 and ours.snapshot().hops == 1


def test_a_result_of_another_shape_is_an_error(address, ffn):
    with connected(address) as attention, pytest.raises(FfnError, match=r"\[2, 1\], expected .*\[2, 64\]"):
        attention.hop(torch.ones(2, HIDDEN), 3)


def test_threads_take_turns(address, ffn):
    with connected(address) as attention:
        wrong = []

        def work(value):
            for _ in range(200):
                if not torch.equal(
                    attention.hop(torch.full((2, HIDDEN), value), 0), torch.full((2, HIDDEN), 2 * value)
                ):
                    wrong.append(value)

        threads = [threading.Thread(target=work, args=(float(value),)) for value in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# Connecting


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


def test_nobody_there_ends_at_the_deadline(address):
    with pytest.raises(ConnectTimeout, match=r"within 0\.[23] s; start it"), connected(address, timeout_s=0.2):
        pass


def test_a_server_that_never_answers_ends_at_the_deadline(address):
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind(address)
    silent.listen()
    with pytest.raises(ConnectTimeout), connected(address, timeout_s=0.2):
        pass
    silent.close()


def test_closing_ends_a_wait_for_a_connection(address):
    attention = ShmAttentionConnector(address)
    caught = []

    def attend():
        try:
            attention.connect(greeting("attention"))
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    until(lambda: len(os.listdir(f"/proc/self/task/{thread.native_id}")) > 0, "the thread runs")
    threading.Event().wait(0.1)
    attention.close()
    thread.join(10)
    assert not thread.is_alive() and "closed meanwhile" in str(caught[0])


def test_a_mismatch_names_field_and_values_on_both_sides(address, ffn, page):
    expected = pytest.raises(GreetingMismatch, match="dtype: ours bfloat16, theirs float32")
    with expected as caught, connected(address, greeting={"dtype": "bfloat16"}):
        pass
    assert [mismatch.field for mismatch in caught.value.mismatches] == ["dtype"]
    until(lambda: page.snapshot().peers_refused == 1, "the refusal is counted")
    assert "dtype: ours float32, theirs bfloat16" in page.snapshot().last_error


def test_a_taken_address_is_an_error_that_says_what_to_do(address, ffn):
    with pytest.raises(AddressInUse, match="choose another port"):
        ShmFfnConnector(address).listen(greeting("ffn"))


def test_long_hosts_get_a_short_address():
    addresses = {address_of("h" * length, 1239, 0) for length in (20, 200, 201)}
    assert len(addresses) == 3
    for address in addresses:
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(address)


def test_two_attention_ranks_are_served_and_a_rank_twice_is_refused(address, ffn, page):
    with connected(address) as first, connected(address, greeting={"rank": 1}) as second:
        with (
            pytest.raises(ConnectionRefused, match="rank 1 is connected already"),
            connected(address, greeting={"rank": 1}),
        ):
            pass
        for _ in range(50):
            assert first.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2
            assert second.hop(torch.full((2, HIDDEN), 3.0), 0)[0, 0] == 6
        until(lambda: page.snapshot().peers == 2 and page.snapshot().hops == 100, "both counted")
        assert page.snapshot().peers_refused == 1
    until(lambda: page.snapshot().peers == 0, "both have left")


def test_a_process_of_another_user_is_refused(address, page):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with ffn_process(address, page):
        pid = os.fork()
        if not pid:
            os.setuid(65534)
            try:
                sock = stranger(address)
                os._exit(42 if b"runs as user 65534" in sock.recv(65536) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        until(lambda: page.snapshot().peers_refused == 1, "the refusal is counted")


def test_a_listener_of_another_user_is_refused(address):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen()
        os.write(tell, b"!")
        listener.accept()[0].recv(65536)
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(ConnectionRefused, match="runs as user 65534, expected 0"), connected(address):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(tell)


# Loading


def test_a_loading_server_greets_and_its_hops_wait_without_the_hop_deadline(address, page):
    connector = ShmFfnConnector(address, page=page)
    connector.listen(greeting("ffn"))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            hop = connector.receive(0.05)
            if hop is not None:
                connector.reply(hop, hop.hidden + 1)

    server = threading.Thread(target=serve)
    server.start()
    results = []
    attention = ShmAttentionConnector(address, hop_timeout_s=0.2, connect_timeout_s=30)
    assert attention.connect(greeting("attention")).state == "loading"
    client = threading.Thread(target=lambda: results.append(attention.hop(torch.ones(1, HIDDEN), 0)))
    client.start()
    client.join(0.6)
    assert client.is_alive() and not results
    connector.set_serving()
    client.join(10)
    assert torch.equal(results[0], torch.full((1, HIDDEN), 2.0))
    with connected(address, greeting={"rank": 1}) as late:
        late.wait_ready(time.monotonic())
    stop.set()
    server.join()
    attention.close()
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


# Loss


def test_a_killed_server_ends_a_hop_at_once(address, ffn):
    with connected(address, hop_timeout_s=100) as attention:
        threading.Timer(0.2, ffn.kill).start()
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"layer 2, sequence 1.*after 0\.\d+ s.*connect again") as caught:
            attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)
        assert time.monotonic() - started < 20 and not isinstance(caught.value, HopTimeout)
        assert not attention.peer_alive()
        with pytest.raises(PeerLost, match="no connection"):
            attention.hop(torch.ones(1, HIDDEN), 0)


def test_a_stopped_server_ends_a_hop_at_the_deadline_and_its_late_answer_is_never_taken(address, ffn, page):
    attention = ShmAttentionConnector(address, hop_timeout_s=0.3)
    attention.connect(greeting("attention"))
    attention.hop(torch.ones(1, HIDDEN), 0)
    os.kill(ffn.pid, signal.SIGSTOP)
    try:
        with pytest.raises(HopTimeout, match=r"sequence 2.*did not answer in time after 0\.3"):
            attention.hop(torch.full((1, HIDDEN), 7.0), 0)
    finally:
        os.kill(ffn.pid, signal.SIGCONT)
    with pytest.raises(PeerLost, match="connect again"):
        attention.hop(torch.ones(1, HIDDEN), 0)
    # The same rank comes back, and sends the hop again under its number.
    attention.connect(greeting("attention"), time.monotonic() + 20)
    assert torch.equal(attention.hop(torch.full((1, HIDDEN), 8.0), 0), torch.full((1, HIDDEN), 16.0))
    assert page.snapshot().peers == 1
    attention.close()


def test_the_same_connector_takes_a_server_that_came_back(address):
    ours = StatusPage.create("attention")
    attention = ShmAttentionConnector(address, page=ours)
    first = StatusPage.create("ffn")
    with ffn_process(address, first) as process:
        attention.connect(greeting("attention"))
        attention.hop(torch.ones(1, HIDDEN), 0)
        process.kill()
        process.join()
        with pytest.raises(PeerLost):
            attention.hop(torch.ones(1, HIDDEN), 0)
        assert ours.snapshot().peers == 0
    with ffn_process(address, StatusPage.create("ffn")):
        attention.connect(greeting("attention"))
        assert ours.snapshot().peers == 1
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
    attention.close()


def test_a_reply_with_an_old_number_breaks_the_connection(address):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()

    def answer_wrongly():
        sock, _ = listener.accept()
        sock.recv(65536)
        sock.send(greeting("ffn", state="serving").encode())
        hop = Header.unpack(sock.recv(100))
        layout = Layout.of(greeting("attention"))
        sock.send(hop._replace(kind=Kind.REPLY, sequence=hop.sequence - 1, offset=layout.f2a_offset(0)).pack())
        sock.recv(100)

    server = threading.Thread(target=answer_wrongly)
    server.start()
    with connected(address) as attention, pytest.raises(PeerLost, match=r"sequence 0.*expected REPLY, sequence 1"):
        attention.hop(torch.ones(1, HIDDEN), 0)
    server.join(10)
    listener.close()


def test_an_interrupted_hop_leaves_no_connection(address, ffn):
    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with connected(address) as attention:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)
            assert not attention.peer_alive()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_closing_ends_a_hop_of_another_thread(address, ffn):
    with connected(address) as attention:
        threading.Timer(0.2, attention.close).start()
        with pytest.raises(PeerLost):
            attention.hop(torch.ones(1, HIDDEN), HANGING_LAYER)


def test_a_peer_that_dies_frees_its_mapping(address, ffn, page):
    def mapped():
        with open(f"/proc/{ffn.pid}/maps") as lines:
            return sum("afdpatch-" in line and "status" not in line for line in lines)

    idle = len(os.listdir(f"/proc/{ffn.pid}/fd"))
    pid = os.fork()
    if not pid:
        attention = ShmAttentionConnector(address)
        attention.connect(greeting("attention"))
        attention.hop(torch.ones(1, HIDDEN), 0)
        signal.pause()
    until(lambda: page.snapshot().hops == 1, "the peer has sent a hop")
    assert mapped() == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: page.snapshot().peers == 0 and mapped() == 0, "the mapping is gone")
    assert len(os.listdir(f"/proc/{ffn.pid}/fd")) == idle


def test_a_peer_that_dies_in_its_hop_does_no_harm(address, ffn, page):
    sock = raw_peer(address)
    layout = Layout.of(greeting("attention"))
    good = Header(Kind.HOP, 3, 1, 0, 0, 0, 1, HIDDEN, 0, layout.row_bytes).pack()
    for _ in range(5):
        sock.send(good)
    sock.close()
    with connected(address, greeting={"rank": 1}) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2
    until(lambda: page.snapshot().peers == 0, "both are gone")


# Strangers


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("garbage", [b"\x00\xff" * 40]),
        ("another JSON", [b'{"a": 1}']),
        ("an oversized message", [b"x" * 70_000]),
        ("nested JSON", [b"[" * 60_000]),
        ("a greeting without a memfd", [greeting("attention").encode()]),
        ("a greeting with a long tail", [greeting("attention").encode().ljust(70_000)]),
    ],
)
def test_a_stranger_is_refused_and_counted(address, ffn, page, what, messages):
    sock = stranger(address, *messages)
    answer = sock.recv(65536)
    assert b"refused" in answer, what
    assert ("longer message" in answer.decode()) == ("long" in what or "oversized" in what)
    assert sock.recv(65536) == b""
    until(lambda: page.snapshot().peers_refused == 1, "counted")
    with connected(address) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


@pytest.mark.parametrize("case", ["unsealed", "small", "a socket", "two"])
def test_a_memfd_that_could_hurt_is_refused_and_closed(address, ffn, page, case):
    layout = Layout.of(greeting("attention"))
    idle = len(os.listdir(f"/proc/{ffn.pid}/fd"))
    fds = {
        "unsealed": lambda: [memfd(layout, seals=0)],
        "small": lambda: [memfd(layout, size=4096)],
        "a socket": lambda: [socket.socket(socket.AF_UNIX).detach()],
        "two": lambda: [memfd(layout), memfd(layout)],
    }[case]()
    sock = stranger(address, greeting("attention").encode(), fds=fds)
    for fd in fds:
        os.close(fd)
    assert b"refused" in sock.recv(65536)
    until(lambda: page.snapshot().peers_refused == 1, "counted")
    assert page.snapshot().peers == 0
    until(lambda: len(os.listdir(f"/proc/{ffn.pid}/fd")) == idle, "its descriptors are closed")


def test_a_silent_stranger_is_dropped_and_holds_nobody_up(address, ffn, page):
    sock = stranger(address)
    with connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    assert b"sent no greeting within 0.5 s" in sock.recv(65536)
    assert page.snapshot().peers_refused == 1


def test_more_waiting_strangers_than_the_limit_are_refused(address, ffn, page):
    crowd = [stranger(address) for _ in range(40)]
    until(lambda: page.snapshot().peers_refused >= 40, "all are dropped")
    assert len(crowd) == 40
    with connected(address) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


GOOD_HOP = Header(Kind.HOP, 3, 1, 0, 0, 0, 1, HIDDEN, 0, HIDDEN * 4).pack()


@pytest.mark.parametrize(
    "messages",
    [
        [GOOD_HOP, GOOD_HOP[:20]],
        [b"x" * HEADER_BYTES],
        [GOOD_HOP + b"x"],
        [Header(Kind.HOP, 3, 1, 0, 0, 0, 99, HIDDEN, 0, 99 * HIDDEN * 4).pack()],
    ],
    ids=["short", "garbage", "long", "too many rows"],
)
def test_a_peer_that_breaks_the_protocol_is_dropped_and_counted(address, ffn, page, messages):
    with connected(address, greeting={"rank": 1}) as good:
        sock = raw_peer(address, *messages)
        while sock.recv(65536):
            pass
        until(lambda: page.snapshot().peers_refused == 1 and page.snapshot().peers == 1, "dropped and counted")
        assert good.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


def test_a_peer_that_never_reads_its_answers_is_dropped(address, ffn, page):
    sock = raw_peer(address)
    hop = Header(Kind.HOP, 3, 1, 0, 0, 0, 1, HIDDEN, 0, Layout.of(greeting("attention")).row_bytes).pack()
    with pytest.raises((BrokenPipeError, ConnectionResetError, TimeoutError)):
        for _ in range(100_000):
            sock.send(hop)
    until(lambda: page.snapshot().peers == 0, "dropped")


# Long runs


def test_descriptors_and_memory_stay_flat_over_20000_hops(address, ffn):
    def used(pid):
        with open(f"/proc/{pid}/statm") as text:
            return int(text.read().split()[1]) * 4096, len(os.listdir(f"/proc/{pid}/fd"))

    with connected(address) as attention:
        hidden = torch.ones(4, HIDDEN)
        for _ in range(2000):
            attention.hop(hidden, 0)
        before = [used(pid) for pid in (os.getpid(), ffn.pid)]
        for _ in range(20_000):
            attention.hop(hidden, 0)
        after = [used(pid) for pid in (os.getpid(), ffn.pid)]
    for (memory, fds), (memory_later, fds_later) in zip(before, after, strict=True):
        assert fds_later == fds
        assert memory_later - memory < 4 << 20


def test_connecting_again_and_again_leaks_nothing(address, ffn, page):
    def used():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), ffn.pid)]

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
