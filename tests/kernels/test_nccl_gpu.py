"""`NcclBuffers` on two GPUs: rows that go both ways, graphs, peers that die, stop or never come. Needs two GPUs.

With -s it says what things took.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from afdpatch.kernels import HopCode, HopError
from afdpatch.kernels.nccl import NcclBuffers
from afdpatch.kernels.nccl_library import new_id, version

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA GPUs; found {GPUS}"),
]
HIDDEN, MAX_ROWS, LAYERS = 2048, 512, 20


def say(what: str, **figures: Any) -> None:
    print(f"\nNCCL {what}: {json.dumps(figures)}", flush=True)


def buffers(first: bool, deadline_s: float) -> NcclBuffers:
    device = torch.device("cuda", 0 if first else 1)
    torch.cuda.set_device(device)
    return NcclBuffers.create(MAX_ROWS, HIDDEN, "bfloat16", 1, device, initiator=first, deadline_s=deadline_s)


def answer(pipe: Connection) -> None:
    """The other side: joins what it is told, and answers steps of hops with twice the rows."""
    ours = buffers(False, 60.0)
    stream = torch.cuda.Stream()
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(rows: int) -> None:
        for layer in range(LAYERS):
            ours.send(ours.receive(rows, layer) * 2, layer)

    with torch.inference_mode(), torch.cuda.stream(stream), contextlib.suppress(EOFError):
        while True:
            what, value = pipe.recv()
            if what == "join":
                ours.open(value)
                ours.join(time.monotonic() + 20)
            elif what == "step":
                step(value)
            elif what == "capture":
                graphs[value] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[value], stream=stream, capture_error_mode="thread_local"):
                    step(value)
            elif what == "replay":
                graphs[value].replay()
            pipe.send(what)


class Peer:
    """The other side's process."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=answer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, what: str, value: object) -> None:
        self.pipe.send((what, value))

    def done(self) -> None:
        assert self.pipe.poll(60), "no answer from the other process"
        self.pipe.recv()

    def join(self, ours: NcclBuffers) -> float:
        name = ours.handle()
        began = time.monotonic()
        self.tell("join", name)
        ours.open(name)
        ours.join(time.monotonic() + 40)
        self.done()
        return round(time.monotonic() - began, 3)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.end()


class Looking:
    """A thread that looks, as a connector's does."""

    def __init__(self, ours: NcclBuffers) -> None:
        self._over = threading.Event()
        self._ours = ours
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self._ours.look()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def hops(ours: NcclBuffers, sent: torch.Tensor) -> torch.Tensor:
    """A step of this side: each layer's reply is the next layer's rows, halved."""
    hidden = sent
    for layer in range(LAYERS):
        hidden = ours.exchange(hidden, layer, 0, torch.empty_like(hidden)) / 2
    return hidden


def captured(ours: NcclBuffers, peer: Peer, sent: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The step as a graph on both sides, in the mode in which vLLM captures."""
    graph = torch.cuda.CUDAGraph()
    peer.tell("capture", len(sent))
    with torch.cuda.graph(graph):
        out = hops(ours, sent)
    peer.done()
    return graph, out


def in_time(seconds: float, work: Callable[[], Any]) -> float:
    """What it took; fails where it hangs."""
    began = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not through after {seconds} s"
    return round(time.monotonic() - began, 3)


def test_eager_steps_and_graphs_bring_the_rows_that_were_sent(peer: Peer) -> None:
    ours = buffers(True, 60.0)
    say("joined", version=version(), s=peer.join(ours))
    looking = Looking(ours)
    with torch.inference_mode():
        for rows in (1, 64, MAX_ROWS):
            sent = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
            took: dict[str, list[float]] = {"eager": [], "graph": []}
            for _ in range(10):
                peer.tell("step", rows)
                torch.cuda.synchronize()
                began = time.monotonic()
                ours.begun()
                out = hops(ours, sent)
                ours.launched()
                torch.cuda.synchronize()
                took["eager"].append(time.monotonic() - began)
                peer.done()
                assert torch.equal(out, sent)
            graph, out = captured(ours, peer, sent)
            for index in range(10):
                sent.copy_(torch.full_like(sent, index))
                peer.tell("replay", rows)
                peer.done()
                torch.cuda.synchronize()
                began = time.monotonic()
                ours.begun()
                graph.replay()
                ours.launched()
                torch.cuda.synchronize()
                took["graph"].append(time.monotonic() - began)
                assert torch.equal(out, sent), index
            say("hop", rows=rows, **{mode: f"{min(each) / LAYERS * 1e6:.1f} us" for mode, each in took.items()})
    assert ours.status().code is HopCode.OK
    looking.end()
    peer.end()
    del graph
    say("given back", s=in_time(20, ours.close))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_peer_that_is_killed_in_a_step_leaves_the_gpu_usable_and_another_is_joined(mode: str) -> None:
    first, second = Peer(), Peer()
    ours = buffers(True, 60.0)
    first.join(ours)
    sent = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    kept = None
    with torch.inference_mode():
        # CUDA loads a kernel at its first use, which would wait for the hops below.
        first.tell("step", 8)
        assert torch.equal(hops(ours, sent), sent)
        first.done()
        if mode == "graph":
            kept = captured(ours, first, sent)
            first.tell("replay", 8)
            first.done()
            kept[0].replay()
            torch.cuda.synchronize()

        def unanswered() -> None:
            """The other side is told nothing of these steps. A launch may wait on the host, too."""
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    kept[0].replay() if kept is not None else hops(ours, sent)
            torch.cuda.synchronize()

        def end() -> None:
            first.end()
            ours.abort()

        threading.Timer(1.0, end).start()
        say(f"{mode}: through after", s=in_time(20, unanswered))
        say(f"{mode}: left after", s=in_time(20, ours.disconnect))
        assert float(torch.ones(1000, device="cuda").sum()) == 1000
        say(f"{mode}: joined another", s=second.join(ours))
        second.tell("step", 8)
        assert torch.equal(hops(ours, sent), sent)
        second.done()
    second.end()
    in_time(20, ours.close)


def test_a_peer_that_is_stopped_ends_a_step_at_its_deadline(peer: Peer) -> None:
    ours = buffers(True, 2.0)
    peer.join(ours)
    looking = Looking(ours)
    assert peer.process.pid is not None
    os.kill(peer.process.pid, signal.SIGSTOP)
    sent = torch.randn(8, HIDDEN, device="cuda").bfloat16()
    with torch.inference_mode():
        ours.begun()
        hops(ours, sent)
        ours.launched()
        say("stopped: through after", s=in_time(20, torch.cuda.synchronize))
    assert ours.status().code is HopCode.DEADLINE
    looking.end()
    say("stopped: left after", s=in_time(20, ours.close))


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_that_never_joins_ends_the_wait(first: bool) -> None:
    ours = buffers(first, 2.0)
    ours.open(new_id())
    began = time.monotonic()
    with pytest.raises(HopError, match="joining"):
        ours.join(time.monotonic() + 3)
    say("never joined: ended after", first=first, s=round(time.monotonic() - began, 3))
    in_time(20, ours.close)
