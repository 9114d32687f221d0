"""Graphs over the `ipc` connector, without a GPU: whole and in pieces, what is told of them, and their loss."""

import socket
import threading
from typing import Any

import pytest
from torch import Tensor

from afdpatch.runtime.connectors import ipc_ffn
from afdpatch.runtime.connectors.base import InvalidHop, StepLost
from afdpatch.runtime.step_route import StepRoute
from tests.runtime.gpu_pair import LAYERS, Pair, capture, replay
from tests.runtime.helpers import until


def test_a_captured_step_is_replayed_as_a_whole_and_an_unknown_graph_is_an_error(
    pair: Pair, capturing: list[bool]
) -> None:
    with pytest.raises(InvalidHop, match="replay of 8 rows"):
        pair.route.begin_replay(8)
    connection = pair.route.under_way
    assert connection is None
    pair.step(8)
    capture(pair, 8, capturing)
    replay(pair, 8, hops=6)
    assert pair.ffn_page.snapshot().errors == 0
    assert pair.attention_page.snapshot().hops == pair.ffn_page.snapshot().hops == 6


def test_of_a_step_whose_pieces_were_captured_the_ffns_half_is_replayed(
    pair: Pair, replays: list[int], capturing: list[bool]
) -> None:
    """The hops of such a step stay launches here; only steps of other sizes are computed layer by layer there."""
    pair.step(2)
    pair.computed.clear()
    for _ in LAYERS:
        pair.route.pieces_captured(8)
    assert pair.step(8) == pair.step(4) == pair.step(8) == 24.0
    capture(pair, 8, capturing)  # the graph of a whole step, of the same size
    replay(pair, 8, hops=15)
    until(lambda: replays == [8, 8, 8], "three replays")
    assert pair.computed == [row for rows in (16, 8, 8, 4, 8, 8) for row in [rows] * len(LAYERS)]
    assert pair.ffn_page.snapshot().errors == 0
    assert pair.attention_page.snapshot().hops == pair.ffn_page.snapshot().hops == 15


def test_what_was_captured_in_pieces_is_told_to_each_server_that_comes(pair: Pair, replays: list[int]) -> None:
    pair.route.pieces_captured(8)
    assert pair.step(8) == 24.0
    pair.loop.stop()
    assert pair.attention_page.snapshot().peers == 1
    pair.route.pieces_captured(4)  # it has gone, and nobody knows
    assert pair.attention_page.snapshot().peers == 0
    pair.route.pieces_captured(2)  # there is none
    pair.computed.clear()
    threading.Timer(0.5, pair.start_ffn).start()
    assert pair.step(8) == 24.0
    assert pair.step(4) == pair.step(2) == 24.0
    until(lambda: replays == [8, 8, 4, 2], "the four replays")
    assert pair.computed == [row for rows in (16, 8, 8, 4, 4, 2, 2) for row in [rows] * len(LAYERS)]
    assert pair.ffn_page.snapshot().errors == 0


def test_pieces_that_are_captured_while_a_connection_is_made_are_told_before_their_first_step(
    pair: Pair, replays: list[int]
) -> None:
    pair.route._gpu.pieces.add(8)  # too late for `connect`, and before the connection serves
    assert pair.step(8) == 24.0
    until(lambda: replays == [8], "the replay")
    assert pair.ffn_page.snapshot().errors == 0


def test_a_step_waits_for_a_server_that_comes_back_and_graphs_are_captured_again(
    pair: Pair, capturing: list[bool]
) -> None:
    pair.step(8)
    capture(pair, 8, capturing)
    pair.loop.stop()
    threading.Timer(0.5, pair.start_ffn).start()
    assert pair.step(8) == 24.0
    until(lambda: pair.frozen.count(True) == 2, "the graph at the new server")
    replay(pair, 8, hops=9)
    assert pair.ffn_page.snapshot().errors == 0


def test_a_server_computes_the_most_that_can_come_and_each_size_before_its_first_graph(
    pair: Pair, capturing: list[bool]
) -> None:
    """A new one is asked for graphs before any step; vLLM's workspace must not grow under a graph."""
    pair.step(2)
    capture(pair, 8, capturing)
    pair.loop.stop()
    pair.computed.clear()
    pair.start_ffn()
    assert pair.step(2) == 24.0
    assert pair.computed == [16] * len(LAYERS) + [8] * len(LAYERS) + [2] * len(LAYERS)


@pytest.mark.parametrize("sizes", [12, 400], ids=["some", "more than the socket holds"])
def test_a_step_at_a_server_that_came_back_does_not_wait_for_the_graphs_of_all_sizes(
    pair: Pair, replays: list[int], sizes: int
) -> None:
    """That may take longer than a hop may: a step that waited for all would be lost, and so would each repeat."""
    pair.restart(max_rows=sizes)
    assert pair.step(2) == 24.0
    pair.route._gpu.pieces.update(range(1, sizes + 1))
    connection = pair.route.under_way
    assert connection is not None and connection._sock is not None
    connection._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the FFN")
    pair.computed.clear()
    assert pair.step(8) == pair.step(8) == 24.0
    until(lambda: replays == [8, 8], "two replays")
    # The largest is captured first: the others find room in its graph's memory.
    assert pair.computed == [row for rows in (sizes, sizes, 8, 8, 8) for row in [rows] * len(LAYERS)]
    assert pair.ffn_page.snapshot().errors == 0


def test_the_most_that_can_come_is_what_this_servers_greeting_says_and_not_its_first_peers(
    pair: Pair, capturing: list[bool]
) -> None:
    """vLLM's workspace is locked while there are graphs: a later peer with longer steps could never be computed."""
    pair.route.close()
    until(lambda: pair.ffn_page.snapshot().peers == 0, "it has left")
    pair.connect(max_rows=12)
    pair.step(2)
    pair.computed.clear()
    capture(pair, 8, capturing)
    assert pair.computed == [16] * len(LAYERS) + [8] * len(LAYERS)


def test_where_no_graph_can_be_captured_nothing_stays_frozen_and_each_step_without_is_counted_and_told_once(
    pair: Pair, capturing: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(self: Any, peer: Any, rows: int) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ipc_ffn.GpuFfnConnector, "_record", record)
    pair.step(2)
    capture(pair, 8, capturing)
    until(lambda: pair.frozen == [True, False], "not frozen any more")
    assert pair.ffn_page.snapshot().errors == 1
    assert pair.step(2) == 24.0
    with caplog.at_level("ERROR"):
        for hops in (9, 12, 15):
            replay(pair, 8, hops)
    assert pair.ffn_page.snapshot().errors == 4
    assert sum("such steps are computed eagerly" in text for text in caplog.messages) == 1


def test_a_graph_is_launched_over_the_connection_on_which_it_was_announced_or_not_at_all(
    pair: Pair, capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the next one nobody has announced it: its rows would be taken for those of the step that is."""
    pair.step(8)
    capture(pair, 8, capturing)
    assert pair.route.begin_replay(8)
    connection = pair.route.under_way
    assert connection is not None and connection._sock is not None
    connection._sock.shutdown(socket.SHUT_RDWR)
    tending = threading.Thread(target=pair.route.tend)
    tending.start()
    tending.join(0.5)
    assert connection._sock is not None
    pair.route.end_replay()
    tending.join(10)
    with pytest.raises(StepLost):
        pair.route.check(connection)
    assert pair.step(8) == 24.0
    original = StepRoute.hop

    def hop(self: StepRoute, *of: Any) -> Tensor:
        result = original(self, *of)
        assert self.under_way is not None
        self._peers.lose(self.under_way, "just now")
        return result

    monkeypatch.setattr(StepRoute, "hop", hop)
    with pytest.raises(StepLost, match=r"replay of 8 rows: .*closed"):
        pair.route.begin_replay(8)


def test_a_draining_server_that_still_loads_lets_a_peer_go_that_wants_its_graphs(pair: Pair) -> None:
    pair.step(2)
    pair.route.pieces_captured(8)
    pair.loop.stop()
    pair.start_ffn(serving=False)
    until(lambda: pair.route.tend() or pair.ffn_page.snapshot().peers == 1, "the peer")
    pair.ffn_page.request_drain(True)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the draining server")
