"""The connector `nccl` without a GPU: names of communicators, steps, graphs, peers that die or stop, ways back."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afdpatch.kernels import HopCode, HopError
from afdpatch.kernels.nccl import NcclBuffers, _Step
from afdpatch.kernels.nccl_library import NcclError
from afdpatch.runtime.config import AfdConfig, ConfigError
from afdpatch.runtime.connectors._ipc import Announced, HangUp
from afdpatch.runtime.connectors.base import ConnectionRefused, ConnectorError, FfnError, InvalidHop, StepLost
from afdpatch.runtime.connectors.factory import attention_connectors, ffn_connector, gpu_ffn_connector
from afdpatch.runtime.connectors.ipc_attention import GpuAttentionConnector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.protocol import Greeting, ProtocolError
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import StatusPage
from afdpatch.runtime.step_route import StepRoute
from tests.runtime import helpers, nccl_stand_in
from tests.runtime.helpers import free_port, until
from tests.runtime.nccl_stand_in import CAPTURING, living

LAYERS = (0, 1, 2)
HIDDEN = 8
SENT = 24.0
"""What a step makes of ones."""


greeting = partial(
    helpers.greeting, layers=LAYERS, hidden_size=HIDDEN, max_rows=16, micro_batches=1, num_attention_ranks=1
)


def configuration(port: int, **keys: float) -> dict[str, Any]:
    extra = {"hop_timeout_s": 5, "connect_timeout_s": 20, "recovery_timeout_s": 10} | keys
    extra["recovery_timeout_s"] = max(extra["recovery_timeout_s"], extra["hop_timeout_s"])
    return {"connector": "nccl", "port": port, "connector_extra_config": extra}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    nccl_stand_in.install(monkeypatch.setattr)
    yield
    until(lambda: not living, "all communicators aborted")


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_a_communicators_name_has_its_length_or_is_refused() -> None:
    assert Greeting.decode(greeting("attention", communicator="0a" * 128).encode()).communicator == "0a" * 128
    for name in ("0a" * 127, "0a" * 129, "0A" * 128, "zz" * 128, 7):
        with pytest.raises(ProtocolError, match="communicator"):
            greeting("attention", communicator=name)


def pair_of_buffers(deadline_s: float = 5.0) -> tuple[NcclBuffers, NcclBuffers]:
    """Two sides that have joined."""
    sides = [
        NcclBuffers.create(16, HIDDEN, "float32", 1, torch.device("cpu"), initiator=first, deadline_s=deadline_s)
        for first in (True, False)
    ]
    name = sides[0].handle()
    for side in sides:
        side.open(name)
    other = threading.Thread(target=sides[1].join, args=(time.monotonic() + 10,), name="afd-nccl-join")
    other.start()
    sides[0].join(time.monotonic() + 10)
    other.join()
    return sides[0], sides[1]


def test_rows_go_both_ways_and_after_an_abort_nothing_does_anything() -> None:
    first, second = pair_of_buffers()
    rows = torch.arange(24.0).view(3, HIDDEN)
    first.send(rows, 0)
    received = second.receive(3, 0)
    until(lambda: torch.equal(received, rows), "the rows at the other side")
    with pytest.raises(HopError, match=r"found \[3, 4\]"):
        first.send(torch.zeros(3, 4), 0)
    first.abort()
    assert first.status().code is HopCode.ABORTED and second.status().code is HopCode.OK
    first.send(rows, 1)
    out = torch.full_like(rows, 7.0)
    assert torch.equal(first.receive(3, 1, 0, out), torch.full_like(rows, 7.0))
    first.close(), second.close()
    assert not first.connected and not living


def test_a_peer_that_never_joins_ends_the_wait_at_its_deadline() -> None:
    side = NcclBuffers.create(16, HIDDEN, "float32", 1, torch.device("cpu"), initiator=True, deadline_s=5.0)
    side.open(side.handle())
    with pytest.raises(HopError, match="joining the communicator: NCCL's own work: not done in time"):
        side.join(time.monotonic() + 0.2)
    assert side.status().code is HopCode.DEADLINE
    side.close()


class Never:
    """An event that the GPU doesn't get to."""

    def query(self) -> bool:
        return False


def test_a_step_that_the_gpu_does_not_get_through_ends_at_the_deadline() -> None:
    first, second = pair_of_buffers(deadline_s=60.0)
    first.begun()
    first.launched()
    first.look()
    assert not first._steps, "a step that is through is forgotten"
    late = _Step(time.monotonic() - 61)
    late.done = Never()  # type: ignore[assignment]
    first._steps.append(_Step(time.monotonic()))
    first._steps[0].done = Never()  # type: ignore[assignment]
    first._steps.append(late)
    first.look()
    assert first.status().code is HopCode.OK, "behind another one it doesn't count yet"
    first._steps.popleft()
    first.look()
    assert first.status().code is HopCode.DEADLINE and "after 60 s" in str(first.status())
    first.close(), second.close()


class Vanishing(deque[_Step]):
    """Steps of which the last is taken back while somebody looks."""

    def __bool__(self) -> bool:
        self.clear()
        return True


def test_a_step_that_is_taken_back_while_somebody_looks_does_not_end_the_watch() -> None:
    first, second = pair_of_buffers()
    first._steps = Vanishing([_Step(time.monotonic())])
    first.look()
    assert first.status().code is HopCode.OK
    first._steps = deque()
    first.close(), second.close()


def test_a_watch_that_fails_ends_what_it_watches() -> None:
    ours, theirs = socket.socketpair()
    gone = threading.Event()

    def look() -> None:
        raise ValueError("a bug")

    with ours, theirs:
        watch = HangUp(ours, gone.set, look)
        assert gone.wait(10)
        watch.stop()


@pytest.mark.parametrize("keys", [{"host": "10.0.0.1"}, {"connector_extra_config": {"ffn_addresses": ["10.0.0.1:9"]}}])
def test_between_hosts_it_wants_a_secret(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"secret_file.*nccl"):
        AfdConfig.parse({"connector": "nccl", **keys})
    assert AfdConfig.parse({"connector": "nccl", "num_ffn_ranks": 3}).fallbacks_of(0) == ()


def test_a_tcp_and_an_nccl_server_refuse_each_other_by_name() -> None:
    nccl, tcp = (AfdConfig.parse(configuration(free_port()) | {"connector": name}) for name in ("nccl", "tcp"))
    page = StatusPage.create("ffn")
    gpu = gpu_ffn_connector(nccl, 0, lambda layer, hidden: hidden, lambda frozen: None, page)
    for connector, made in ((gpu, attention_connectors(replace(nccl, connector="tcp"))), (ffn_connector(tcp, 0), None)):
        loop = FfnLoop(connector, lambda layer, hidden: hidden, page, greeting("ffn"))
        loop.start()
        route = Route(nccl, 0, None, made) if made else StepRoute(replace(tcp, connector="nccl"), 0)
        with pytest.raises(ConnectionRefused, match=f"connector is {'nccl' if made else 'tcp'}"):
            route.connect(greeting("attention"))
        route.close()
        assert loop.stop()


# ---- a pair in one process ------------------------------------------------------------------------------------------


class Pair:
    """An FFN loop and a route."""

    def __init__(self) -> None:
        self.port = free_port()
        self.config = AfdConfig.parse(configuration(self.port))
        self.attention_page, self.ffn_page = StatusPage.create("attention"), StatusPage.create("ffn")
        self.fails = False
        self.frozen: list[bool] = []
        self.start_ffn()
        self.route = StepRoute(self.config, 0, self.attention_page)
        self.route.connect(greeting("attention"))
        self.route.wait_ready()

    def start_ffn(self, **keys: float) -> None:
        config = AfdConfig.parse(configuration(self.port, **keys))
        connector = gpu_ffn_connector(config, 0, self.compute, self.frozen.append, self.ffn_page)
        self.loop = FfnLoop(connector, self.compute, self.ffn_page, greeting("ffn"))
        self.loop.start()
        self.loop.serve()

    def compute(self, layer: int, hidden: Tensor) -> Tensor:
        torch.cuda.synchronize()  # a CPU computes at once
        if self.fails:
            raise ValueError("it can't be computed")
        return hidden * (layer + 2)

    def close(self) -> None:
        self.route.close()
        self.loop.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def step(route: StepRoute, rows: int) -> float:
    """A step as a forward makes it."""
    hidden = [torch.ones(rows, HIDDEN)]
    for layer in LAYERS:
        hidden.append(route.hop(hidden[-1], layer))
    torch.cuda.synchronize()
    route.check(route.under_way)
    return float(hidden[-1][0, 0])


def capture(route: StepRoute, rows: int) -> None:
    """What vLLM's capture does: each layer's launches are recorded, and nothing is computed."""
    CAPTURING.yes = True
    for layer in LAYERS:
        route.hop(torch.ones(rows, HIDDEN), layer)
    CAPTURING.yes = False


def replay(route: StepRoute, rows: int) -> float:
    """A replayed step: what the graph's launches do."""
    assert route.begin_replay(rows)
    hidden = [torch.ones(rows, HIDDEN)]
    for layer in LAYERS:
        hidden.append(route._gpu.buffers.exchange(hidden[-1], layer, 0, torch.empty_like(hidden[-1])))
    route.end_replay()
    torch.cuda.synchronize()
    route.check(route.under_way)
    return float(hidden[-1][0, 0])


def test_steps_are_hopped_and_counted_on_both_sides(pair: Pair) -> None:
    assert step(pair.route, 4) == step(pair.route, 16) == SENT
    until(lambda: pair.ffn_page.snapshot().hops == 6, "all hops at the FFN")
    assert pair.attention_page.snapshot().hops == 6 and pair.ffn_page.snapshot().steps == 2


def test_a_captured_step_is_replayed_and_an_unknown_graph_is_an_error(pair: Pair) -> None:
    assert step(pair.route, 8) == SENT
    with pytest.raises(InvalidHop, match="replay of 8 rows"):
        pair.route.begin_replay(8)
    capture(pair.route, 8)
    assert replay(pair.route, 8) == SENT
    until(lambda: pair.ffn_page.snapshot().hops == 6, "the replayed step at the FFN")
    assert pair.route.graphs_stand() and pair.ffn_page.snapshot().errors == pair.attention_page.snapshot().errors == 0


def test_no_half_of_a_step_alone_is_captured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL wants a call captured on all ranks or on none, and hops between pieces of a model are launches."""
    said: list[Announced] = []
    original = GpuAttentionConnector._say_step

    def say(self: Any, what: Announced, *more: Any) -> None:
        said.append(what)
        original(self, what, *more)

    monkeypatch.setattr(GpuAttentionConnector, "_say_step", say)
    pair.route.pieces_captured(8)
    assert step(pair.route, 8) == SENT
    assert said == [Announced.EAGER]


def test_a_step_whose_layer_failed_is_lost_and_the_next_one_goes_over_a_new_communicator(pair: Pair) -> None:
    step(pair.route, 3)
    (before,) = [each for each in living if each is pair.route._gpu.buffers._comm]
    pair.fails = True
    with pytest.raises(FfnError, match="it can't be computed; on the GPU: aborted"):
        step(pair.route, 3)
    pair.fails = False
    assert step(pair.route, 3) == SENT
    assert before not in living and pair.route._gpu.buffers._comm is not before


def test_graphs_end_with_their_connection_and_steps_go_on_eagerly_and_counted(pair: Pair) -> None:
    step(pair.route, 8)
    capture(pair.route, 8)
    assert replay(pair.route, 8) == SENT
    pair.loop.stop()
    assert not pair.route.graphs_stand(), "known before the next connection"
    pair.start_ffn()
    errors = pair.attention_page.snapshot().errors
    assert not pair.route.begin_replay(8), "the server was lost after the step was planned"
    assert step(pair.route, 8) == SENT
    assert not pair.route.graphs_stand()
    assert pair.attention_page.snapshot().errors == errors + 2


@pytest.mark.parametrize("rank", [0, 1], ids=["attention", "ffn"])
def test_a_call_that_nccl_refuses_loses_the_step_and_ends_no_server(pair: Pair, rank: int) -> None:
    """As it does once it has noticed that the peer has died, which may be before anybody else does."""
    assert step(pair.route, 2) == SENT
    (peer,) = pair.loop._connector._peers.values()  # type: ignore[attr-defined]
    refusing = (pair.route._gpu.buffers, peer.buffers)[rank]._comm

    def refuse(*_: object) -> None:
        raise NcclError("a hop: NCCL says remote process exited (6)")

    refusing.receive = refuse
    with pytest.raises(StepLost):
        step(pair.route, 2)
    assert step(pair.route, 2) == SENT
    assert pair.loop.alive


def test_an_ffn_server_without_memory_for_a_peer_refuses_it_and_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object, initiator: bool, **more: object) -> NcclBuffers:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair.route.close()
    with monkeypatch.context() as patch:
        whole = NcclBuffers.create
        patch.setattr(NcclBuffers, "create", lambda *a, **k: (whole if k["initiator"] else create)(*a, **k))
        route = StepRoute(pair.config, 0)
        with pytest.raises(ConnectionRefused, match="as this GPU has memory for"):
            route.connect(greeting("attention"))
        route.close()
    pair.route = StepRoute(pair.config, 0, pair.attention_page)
    pair.route.connect(greeting("attention"))
    assert step(pair.route, 2) == SENT


def test_an_ffn_server_that_cannot_join_for_any_reason_ends_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, tries = NcclBuffers.join, []

    def join(buffers: NcclBuffers, *more: Any) -> None:
        if not buffers.initiator:
            tries.append(1)
            raise RuntimeError("CUDA error: an illegal memory access")
        whole(buffers, *more)

    pair.route.close()
    with monkeypatch.context() as patch:
        patch.setattr(NcclBuffers, "join", join)
        route = StepRoute(pair.config, 0)
        with pytest.raises(ConnectorError):
            route.connect(greeting("attention"), time.monotonic() + 4)
        route.close()
    assert len(tries) > 1, "the first try was ended, not waited for"
    assert "illegal memory access" in caplog.text
    pair.route = StepRoute(pair.config, 0, pair.attention_page)
    pair.route.connect(greeting("attention"))
    assert step(pair.route, 2) == SENT


def test_an_ffn_server_ends_a_step_that_its_peer_does_not_go_on_with(pair: Pair) -> None:
    pair.loop.stop()
    pair.start_ffn(hop_timeout_s=4.0)
    assert step(pair.route, 2) == SENT
    (peer,) = pair.loop._connector._peers.values()  # type: ignore[attr-defined]
    half = pair.route.hop(torch.ones(2, HIDDEN), 0)
    until(lambda: peer.buffers.status().code is HopCode.DEADLINE, "the end of the step at the FFN")
    with pytest.raises(StepLost):  # only then does its host hear of it
        step(pair.route, 2)
    assert step(pair.route, 2) == SENT and half is not None


def test_an_ffn_server_lets_go_of_a_peer_whose_connection_breaks_in_a_step(pair: Pair) -> None:
    pair.loop.stop()
    pair.start_ffn(hop_timeout_s=100.0)
    assert step(pair.route, 2) == SENT
    half = pair.route.hop(torch.ones(2, HIDDEN), 0)
    begun = pair.route.under_way
    assert begun is not None and begun._sock is not None
    begun._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the FFN")
    with pytest.raises(StepLost):
        pair.route.check(begun)
    assert step(pair.route, 2) == SENT and half is not None


def test_a_draining_server_lets_its_peer_go_between_steps(pair: Pair) -> None:
    assert step(pair.route, 2) == SENT
    pair.ffn_page.request_drain(True)
    until(lambda: pair.ffn_page.snapshot().peers == 0, "no peer at the draining server")
    pair.ffn_page.request_drain(False)
    assert step(pair.route, 2) == SENT


# ---- processes ------------------------------------------------------------------------------------------------------


class Servers:
    """FFN servers in processes of their own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, **keys: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.runtime.nccl_stand_in", json.dumps(configuration(self.port, **keys))]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        self.says(process, "serving")
        return process

    def says(self, process: "subprocess.Popen[str]", word: str) -> None:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(word)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=10)


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "gone or failed"), (signal.SIGSTOP, "deadline")], ids=["killed", "stopped"]
)
def test_a_peer_that_dies_or_stops_in_a_step_ends_it_and_another_process_takes_over(
    servers: Servers, number: int, why: str, graph: bool
) -> None:
    server = servers.start()
    patience = 5.0 if number == signal.SIGSTOP else 30.0
    route = StepRoute(AfdConfig.parse(configuration(servers.port, hop_timeout_s=patience)), 0)
    try:
        route.connect(greeting("attention"))
        route.wait_ready()
        assert step(route, 2) == SENT
        capture(route, 13)
        lost: list[BaseException] = []

        def stuck() -> None:
            try:
                (replay if graph else step)(route, 13)
            except StepLost as error:
                lost.append(error)

        hopping = threading.Thread(target=stuck)
        hopping.start()
        servers.says(server, "stuck")
        os.kill(server.pid, number)
        hopping.join(30)
        assert not hopping.is_alive() and why in str(lost[0])
        os.kill(server.pid, signal.SIGKILL)
        server.wait(10)
        servers.start()
        assert step(route, 2) == SENT
        assert not route.graphs_stand()
    finally:
        route.close()
