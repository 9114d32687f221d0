"""A pair without a GPU: the hosts' side of connectors between GPUs, over buffers that stand in for theirs."""

import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors import ipc_attention, ipc_ffn
from afdpatch.runtime.connectors._ipc import Announced
from afdpatch.runtime.connectors.factory import gpu_ffn_connector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.status import StatusPage
from afdpatch.runtime.step_route import StepRoute
from tests.runtime import helpers
from tests.runtime.gpu_stand_in import StandInBuffers, StandInGraph
from tests.runtime.helpers import free_port, until

LAYERS = (0, 1, 2)
HIDDEN = 8


greeting = partial(
    helpers.greeting, layers=LAYERS, hidden_size=HIDDEN, max_rows=16, micro_batches=1, num_attention_ranks=1
)


class Pair:
    """An FFN loop and a route that hop through stand-ins."""

    def __init__(self) -> None:
        keys = {"hop_timeout_s": 5, "connect_timeout_s": 10, "recovery_timeout_s": 8}
        self.config = AfdConfig.parse({"connector": "ipc", "port": free_port(), "connector_extra_config": keys})
        self.attention_page, self.ffn_page = StatusPage.create("attention"), StatusPage.create("ffn")
        self.fails = False
        self.frozen: list[bool] = []
        self.computed: list[int] = []  # rows of each computation
        self.start_ffn()
        self.connect()

    def start_ffn(self, serving: bool = True, **changes: Any) -> None:
        connector = gpu_ffn_connector(self.config, 0, self.compute, self.frozen.append, self.ffn_page)
        self.loop = FfnLoop(connector, self.compute, self.ffn_page, greeting("ffn", **changes))
        self.loop.start()
        if serving:
            self.loop.serve()

    def connect(self, **changes: Any) -> None:
        self.route = StepRoute(self.config, 0, self.attention_page)
        self.route.connect(greeting("attention", **changes))
        self.route.wait_ready()

    def compute(self, layer: int, hidden: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("it can't be computed")
        self.computed.append(len(hidden))
        return hidden * (layer + 2)

    def step(self, rows: int) -> float:
        hidden = torch.ones(rows, HIDDEN)
        for layer in LAYERS:
            hidden = self.route.hop(hidden, layer)
        self.route.check(self.route.under_way)
        return float(hidden[0, 0])

    def restart(self, **changes: Any) -> None:
        """Both sides anew, with other greetings."""
        self.close()
        StandInBuffers.sides.clear()
        self.start_ffn(**changes)
        self.connect(**changes)

    def close(self) -> None:
        self.route.close()
        self.loop.stop()


@pytest.fixture
def capturing() -> list[bool]:
    return [False]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each graph that the FFN's host replayed."""
    found: list[int] = []
    original = ipc_ffn.GpuFfnConnector._begin

    def begin(self: Any, said: Any) -> bool:
        eager = original(self, said)
        if not eager and said.header.offset == Announced.GRAPH:
            found.append(said.header.rows)
        return eager

    monkeypatch.setattr(ipc_ffn.GpuFfnConnector, "_begin", begin)
    return found


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, capturing: list[bool]) -> Iterator[Pair]:
    for module in (ipc_attention, ipc_ffn):
        monkeypatch.setattr(module, "HopBuffers", StandInBuffers)
    idle = types.SimpleNamespace(query=lambda: True)
    for name, value in {
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: capturing[0],
        "graph_pool_handle": lambda: 0,
        "synchronize": lambda *device: None,
        "current_stream": lambda *device: idle,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def record(self: Any, peer: Any, rows: int) -> StandInGraph:
        def step() -> None:
            for layer in peer.layers:
                peer.buffers.send(self._compute(layer, peer.buffers.receive(rows, layer)), layer)

        graph = StandInGraph()
        graph.step = step
        return graph

    monkeypatch.setattr(ipc_ffn.GpuFfnConnector, "_record", record)
    made = Pair()
    yield made
    made.close()


def capture(pair: Pair, rows: int, capturing: list[bool]) -> None:
    """What vLLM's capture does: each layer's launch is recorded, and nothing is computed or counted."""
    connection, before = pair.route.under_way, pair.attention_page.snapshot().hops
    assert connection is not None and connection._end.buffers is not None
    recorded: list[int] = []
    connection._end.buffers.exchange = lambda tensor, layer, *rest: recorded.append(layer) or tensor  # type: ignore
    capturing[0] = True
    for layer in LAYERS:
        pair.route.hop(torch.ones(rows, HIDDEN), layer)
    capturing[0] = False
    del connection._end.buffers.exchange  # type: ignore[attr-defined]
    assert recorded == list(LAYERS) and pair.attention_page.snapshot().hops == before
    until(lambda: True in pair.frozen, "the graph's other half")


def replay(pair: Pair, rows: int, hops: int) -> None:
    """A replayed step: what the graph's launches do. The FFN has counted so many hops after it."""
    pair.route.begin_replay(rows)
    connection = pair.route.under_way
    assert connection is not None and connection._end.buffers is not None
    hidden = torch.ones(rows, HIDDEN)
    for layer in LAYERS:
        hidden = connection._end.buffers.exchange(hidden, layer, 0, hidden)
    pair.route.end_replay()
    pair.route.check(connection)
    assert float(hidden[0, 0]) == 24.0
    until(lambda: pair.ffn_page.snapshot().hops == hops, "the replayed step at the FFN")
