"""The hosts' side of the `ipc` connector, without a GPU: handles, announcements, lost steps, drains."""

import os
import socket
import threading
import time
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from afdpatch.runtime.connectors import ipc_ffn
from afdpatch.runtime.connectors._ipc import Announced, HandlePage, HangUp
from afdpatch.runtime.connectors.base import ConnectionRefused, FfnError, InvalidHop, NoFfnServer, StepLost
from afdpatch.runtime.connectors.factory import gpu_ffn_connector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.protocol import Header, Kind, ProtocolError, error_message
from afdpatch.runtime.status import State, StatusPage
from afdpatch.runtime.step_route import StepRoute
from tests.runtime.gpu_pair import HIDDEN, LAYERS, Pair, greeting
from tests.runtime.gpu_stand_in import StandInBuffers
from tests.runtime.helpers import until

# ---- parts ----------------------------------------------------------------------------------------------------------


def test_both_handles_lie_in_one_page() -> None:
    ours, fd = HandlePage.create()
    theirs = HandlePage.attach(fd)
    os.close(fd)
    ours.put("attention", b"a" * 120)
    assert theirs.get("attention") == b"a" * 120
    assert theirs.get("ffn") == b""
    theirs.put("ffn", b"f" * 120)
    assert ours.get("ffn") == b"f" * 120 and ours.get("attention") == b"a" * 120


def test_a_page_that_could_shrink_or_is_none_is_refused() -> None:
    unsealed = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    read, write = os.pipe()
    for fd in (unsealed, read):
        with pytest.raises(ProtocolError, match="memfd"):
            HandlePage.attach(fd)
    for fd in (unsealed, read, write):
        os.close(fd)


def test_what_is_announced_is_one_of_three() -> None:
    assert [Announced.of(each.value) for each in Announced] == list(Announced)
    with pytest.raises(ProtocolError, match="announced: found 3"):
        Announced.of(3)


def test_a_peer_that_goes_is_noticed_by_the_watch_and_a_stopped_watch_says_nothing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone = threading.Event()
    watch = HangUp(ours, gone.set)
    theirs.close()
    assert gone.wait(10)
    watch.stop()
    ours.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said: list[int] = []
    watch = HangUp(ours, lambda: said.append(1))
    watch.stop()
    assert said == []
    ours.close(), theirs.close()


# ---- a pair ---------------------------------------------------------------------------------------------------------


def test_a_step_is_announced_once_and_its_hops_are_counted_on_both_sides(pair: Pair) -> None:
    assert pair.step(4) == 24.0
    assert pair.step(16) == 24.0
    until(lambda: pair.ffn_page.snapshot().hops == 6, "all hops at the FFN")
    assert pair.attention_page.snapshot().hops == 6 and pair.ffn_page.snapshot().steps == 2


def test_a_step_whose_layer_failed_is_not_to_be_repeated_and_the_next_one_goes_on(pair: Pair) -> None:
    pair.fails = True
    with pytest.raises(FfnError, match=r"it can't be computed; on the GPU: aborted"):
        pair.step(3)
    pair.fails = False
    assert pair.step(3) == 24.0


@pytest.mark.parametrize(("a2f_dtype", "wire"), [("auto", ""), ("fp8_e4m3", "float8_e4m3fn")])
def test_both_sides_make_the_slots_that_the_attention_sides_greeting_asks_for(
    pair: Pair, a2f_dtype: str, wire: str
) -> None:
    pair.config = replace(pair.config, a2f_dtype=a2f_dtype)
    pair.restart(a2f_dtype=a2f_dtype, hidden_size=32)
    assert [side.geometry.wire for side in StandInBuffers.sides] == [wire, wire]


@pytest.mark.parametrize(
    ("merge", "rows", "computed"),
    [(True, (3, 5), [8]), (True, (9, 9), [9, 9]), (False, (3, 5), [3, 5])],
    ids=["together", "too many", "not wanted"],
)
def test_steps_that_were_announced_meanwhile_are_computed_together_as_far_as_there_is_room(
    pair: Pair, merge: bool, rows: tuple[int, int], computed: list[int]
) -> None:
    pair.close()
    pair.computed.clear()
    StandInBuffers.sides.clear()
    pair.config = replace(pair.config, num_attention_ranks=3, merge=merge)
    entered, go_on = threading.Event(), threading.Event()

    def compute(layer: int, hidden: Tensor) -> Tensor:
        entered.set()
        assert go_on.wait(60)
        return Pair.compute(pair, layer, hidden)

    connector = gpu_ffn_connector(pair.config, 0, compute, pair.frozen.append, pair.ffn_page)
    pair.loop = FfnLoop(connector, compute, pair.ffn_page, greeting("ffn", num_attention_ranks=3), merge=merge)
    pair.loop.start()
    pair.loop.serve()
    found: dict[int, float] = {}
    threads = []
    routes = [StepRoute(pair.config, rank, StatusPage.create("attention")) for rank in range(3)]
    for rank, route in enumerate(routes):
        route.connect(greeting("attention", rank=rank, num_attention_ranks=3))
        route.wait_ready()

    def step(rank: int, count: int) -> None:
        hidden = torch.full((count, HIDDEN), float(rank + 1))
        for layer in LAYERS:
            hidden = routes[rank].hop(hidden, layer)
        routes[rank].check(routes[rank].under_way)
        found[rank] = float(hidden[0, 0])

    for rank, count in ((2, 2), (0, rows[0]), (1, rows[1])):
        thread = threading.Thread(target=step, args=(rank, count))
        thread.start()
        threads.append(thread)
        assert entered.wait(60)  # the first step holds the FFN's host up while the others are announced
        theirs = [side for side in StandInBuffers.sides if not side.initiator]
        until(lambda rank=rank, theirs=theirs: rank == 2 or theirs[rank].arrived.qsize() == 1, "it is announced")
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == {0: 24.0, 1: 48.0, 2: 72.0}
    # Steps that aren't computed together don't wait for each other either: one is whole before the next begins.
    apart = [count for count in computed for _ in LAYERS]
    assert pair.computed == [2] * len(LAYERS) + apart
    until(lambda: pair.ffn_page.snapshot().hops == 3 * len(LAYERS), "all hops counted")
    for route in routes:
        route.close()


@pytest.mark.parametrize(
    ("hidden", "out", "found"),
    [
        (torch.ones(0, HIDDEN), None, r"found shape \[0, 8\], expected \[1..16, 8\]"),
        (torch.ones(17, HIDDEN), None, r"found shape \[17, 8\], expected \[1..16, 8\]"),
        (torch.ones(2, HIDDEN).double(), None, "torch.float64"),
        (torch.ones(2, HIDDEN), torch.ones(3, HIDDEN), r"out: found \[3, 8\]"),
        (torch.ones(2, HIDDEN), torch.ones(2, HIDDEN, device="meta"), "on meta"),
        (torch.ones(2, HIDDEN), torch.ones(HIDDEN, 2).t(), r"out: found .*strides \(1, 2\); expected .*, contiguous"),
    ],
)
def test_what_cannot_be_launched_is_not_announced(pair: Pair, hidden: Tensor, out: Tensor | None, found: str) -> None:
    with pytest.raises(InvalidHop, match=found):
        pair.route.hop(hidden, LAYERS[0], out=out)
    assert pair.step(2) == 24.0
    assert pair.ffn_page.snapshot().steps <= 1


def test_rows_that_cannot_travel_in_8_bits_end_the_greeting_with_the_reason(pair: Pair) -> None:
    pair.route.close()
    pair.route = StepRoute(replace(pair.config, a2f_dtype="fp8_e4m3"), 0, pair.attention_page)
    with pytest.raises(ConnectionRefused, match="can't travel between GPUs: hidden: expected a multiple of 16"):
        pair.route.connect(greeting("attention", a2f_dtype="fp8_e4m3"))


def test_a_peer_for_whose_buffers_there_is_no_memory_is_refused_and_the_server_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*sizes: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair.step(2)
    pair.route.close()
    until(lambda: pair.ffn_page.snapshot().peers == 0, "it has left")
    monkeypatch.setattr(ipc_ffn, "HopBuffers", types.SimpleNamespace(create=full))
    pair.route = StepRoute(pair.config, 0, pair.attention_page)
    with pytest.raises(ConnectionRefused, match=r"max_rows: .*16.*as many as this GPU has memory for"):
        pair.route.connect(greeting("attention"))
    assert pair.loop.alive and pair.ffn_page.snapshot().state is not State.FAILED
    monkeypatch.setattr(ipc_ffn, "HopBuffers", StandInBuffers)
    pair.route = StepRoute(pair.config, 0, pair.attention_page)
    pair.route.connect(greeting("attention"))
    pair.route.wait_ready()
    assert pair.step(2) == 24.0


def test_what_a_server_said_before_it_closed_is_read_past_the_reset(pair: Pair) -> None:
    """It closes with announcements unread: the socket tells of the reset first, and then gives the error."""
    pair.step(2)
    pair.loop.stop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    connection: Any = pair.route.under_way
    ours.send(b"announced")
    theirs.send(error_message(Header(Kind.HOP, 0, 5, 1, 2, 0, 3, HIDDEN, 0, 96), "it can't be computed"))
    theirs.close()
    connection._read = lambda: ours.recv_into(connection._in)
    assert "layer 2 can't be computed: it can't be computed" in connection._words()
    assert connection._failed is not None
    ours.close()


def test_what_was_under_way_when_the_connection_broke_is_lost(pair: Pair) -> None:
    hidden = pair.route.hop(torch.ones(2, HIDDEN), 0)
    begun = pair.route.under_way
    assert begun is not None and begun._sock is not None
    begun._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the FFN")
    pair.route.hop(hidden, 1)  # a launch knows nothing of it
    with pytest.raises(StepLost):
        pair.route.check(begun)
    assert pair.step(2) == 24.0


def test_the_watch_over_a_lost_connection_aborts_nothing_of_the_next_one(pair: Pair) -> None:
    """From `disconnect` on another thread may open the buffers to another peer."""
    pair.step(2)
    connection = pair.route.under_way
    assert connection is not None
    buffers, watch = connection._end.buffers, connection._hang_up
    assert watch is not None
    disconnect = buffers.disconnect

    def opened_again() -> None:
        disconnect()
        buffers.aborted = False
        (theirs,) = pair.loop._connector._peers.values()  # type: ignore[attr-defined]
        theirs.sock.shutdown(socket.SHUT_RDWR)
        watch._thread.join(10)
        assert not watch._thread.is_alive()

    buffers.disconnect = opened_again
    connection._drop("lost")
    assert not buffers.aborted


def test_without_a_server_a_step_ends_in_time_and_the_next_one_at_once(pair: Pair) -> None:
    pair.loop.stop()
    pair.route.begin_step(time.monotonic() + 1.0)
    with pytest.raises(NoFfnServer):
        pair.step(2)
    with pytest.raises(NoFfnServer):
        pair.step(2)


def test_a_draining_server_lets_its_peer_go_between_steps(pair: Pair) -> None:
    assert pair.step(2) == 24.0
    pair.ffn_page.request_drain(True)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the draining server")
    pair.ffn_page.request_drain(False)
    assert pair.step(2) == 24.0


def test_a_draining_server_sleeps_while_the_gpu_is_at_work(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take up to its deadline, where the attention server stands still."""
    pair.step(2)
    idle = False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(query=lambda: idle))
    connector: Any = pair.loop._connector
    waits: list[float] = []
    original = connector._wait
    monkeypatch.setattr(connector, "_wait", lambda timeout_s: waits.append(timeout_s) or original(timeout_s))
    pair.ffn_page.request_drain(True)
    until(lambda: waits[-3:].count(0) == 0 and len(waits) > 3, "three waits that sleep")
    assert pair.ffn_page.snapshot().peers == 1
    idle = True
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the draining server")


def test_what_was_computed_before_a_goodbye_was_read_counts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling: the next step is announced before the results of the one before are looked at."""
    hidden = torch.ones(2, HIDDEN)
    for layer in LAYERS:
        hidden = pair.route.hop(hidden, layer)
    before = pair.route.under_way
    assert before is not None
    restarted = threading.Thread(target=lambda: (pair.loop.stop(), pair.start_ffn()))
    waited: list[str] = []

    def synchronize(*device: Any) -> None:
        if not waited:
            waited.append("aborted" if before._end.buffers.aborted else "in peace")  # type: ignore[union-attr]
            restarted.start()

    before._leaves = True  # the goodbye was read by the watch, while the step was on the GPU
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert pair.step(2) == 24.0
    restarted.join()
    assert waited == ["in peace"]
    pair.route.check(before)
    assert float(hidden[0, 0]) == 24.0


@pytest.mark.parametrize("how", ["arrived", "in the socket", "on the list", "on the GPU"])
def test_a_draining_server_keeps_a_peer_to_whom_it_owes_a_step(
    pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.step(2)
    pair.loop.stop()
    connector: Any = pair.loop._connector
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer: Any = object.__new__(ipc_ffn.GpuPeer)
    peer.number, peer.unanswered, peer.let_go, peer.sock = 7, set(), True, ours
    dropped: list[Any] = []
    connector._drop = dropped.append
    connector._peers = {1: peer}
    assert connector._serving
    hop = types.SimpleNamespace(peer=7)
    idle = True
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(query=lambda: idle))
    if how == "arrived":
        connector._arrived = [hop]
    elif how == "on the list":
        connector._todo.append([hop])
    elif how == "in the socket":
        theirs.send(b"announced")
    else:
        idle = False
    connector._let_go()
    assert dropped == []
    connector._arrived = []
    connector._todo.clear()
    idle = True
    if how == "in the socket":
        ours.recv(100)
    connector._let_go()
    assert dropped == [peer]
    connector._peers = {}
    ours.close(), theirs.close()
