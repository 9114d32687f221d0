"""NCCL and CUDA that are neither: communicators move their rows over TCP on this host, what stands for a stream
is a thread. The rest of the connector `nccl` runs as it is, in one process or in several.

As NCCL's, a communicator's name says where rank 0 is found; nothing tells one rank that the other has died; and what a
graph captures isn't done before it is replayed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import secrets
import select
import socket
import struct
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from afdpatch.kernels import nccl
from afdpatch.kernels.nccl_library import ID_BYTES, IN_PROGRESS, SUCCESS
from afdpatch.runtime.connectors.ipc_ffn import GpuFfnConnector

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
CAPTURING = threading.local()
_NAME = struct.Struct("<H30s")
_listeners: dict[bytes, socket.socket] = {}
living: set[StandInCommunicator] = set()


def new_id() -> bytes:
    """A listening socket, and its name."""
    listener = socket.create_server(("127.0.0.1", 0))
    name = _NAME.pack(listener.getsockname()[1], secrets.token_bytes(30)).ljust(ID_BYTES, b"\0")
    _listeners[name] = listener
    return name


def own_rank() -> int:
    """Which side this thread belongs to: a process may have both, and each has a GPU of its own."""
    return int(threading.current_thread().name in ("afd-ffn-loop", "afd-nccl-join"))


class StandInCommunicator:
    """As `Communicator`. A thread does what it is asked for, in order, and is the stream; nobody waits for that."""

    def __init__(self, identity: bytes, rank: int) -> None:
        self.rank = rank
        self.gone = threading.Event()
        self.asked = self.done = 0
        self._sock: socket.socket | None = None
        self._state = IN_PROGRESS
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        living.add(self)
        threading.Thread(target=self._run, args=(identity,), daemon=True).start()

    def _run(self, identity: bytes) -> None:
        self._join(identity)
        self._state = SUCCESS
        while not self.gone.is_set():
            with contextlib.suppress(queue.Empty):
                self._work.get(timeout=0.02)()
                self.done += 1

    def _join(self, identity: bytes) -> None:
        port, secret = _NAME.unpack_from(identity)
        if self.rank == 1:
            self._sock = socket.create_connection(("127.0.0.1", port))
            self._sock.sendall(secret)
            return
        with _listeners.pop(identity) as listener:
            while not self.gone.is_set():
                if select.select([listener], [], [], 0.02)[0]:
                    self._sock, _ = listener.accept()
                    assert self._sock.recv(30, socket.MSG_WAITALL) == secret
                    return

    def state(self) -> int:
        return self._state

    def send(self, pointer: int, numbers: int, dtype: str, stream: int) -> None:
        if not getattr(CAPTURING, "yes", False):
            room = (ctypes.c_char * (numbers * ITEM_BYTES[dtype])).from_address(pointer)
            self._ask(lambda: self._move(memoryview(room).cast("B"), False))

    def receive(self, pointer: int, numbers: int, dtype: str, stream: int) -> None:
        if not getattr(CAPTURING, "yes", False):
            room = (ctypes.c_char * (numbers * ITEM_BYTES[dtype])).from_address(pointer)
            self._ask(lambda: self._move(memoryview(room).cast("B"), True))

    def _ask(self, work: Callable[[], None]) -> None:
        self.asked += 1
        self._work.put(work)

    def _move(self, left: memoryview, receiving: bool) -> None:
        sock = self._sock
        assert sock is not None
        ways = ([sock], [], [], 0.02) if receiving else ([], [sock], [], 0.02)
        with contextlib.suppress(OSError, ValueError):
            while left and not self.gone.is_set():
                if any(select.select(*ways)[:2]):
                    count = sock.recv_into(left) if receiving else sock.send(left, socket.MSG_DONTWAIT)
                    if not count:
                        break
                    left = left[count:]
        if left:
            self.gone.wait(120)  # NCCL waits for a dead peer until it is aborted

    def abort(self) -> None:
        self.gone.set()
        if self._sock is not None:
            self._sock.close()
        living.discard(self)


class StandInBuffers(nccl.NcclBuffers):
    """They keep the tensors that a stream of threads may still need."""

    def __init__(self, *sizes: Any, **more: Any) -> None:
        self.kept: deque[torch.Tensor] = deque(maxlen=100)
        super().__init__(*sizes[:4], torch.device("cpu"), **more)

    def _move(self, what: str, tensor: torch.Tensor, *rest: Any) -> None:
        self.kept.append(tensor)
        super()._move(what, tensor, *rest)


class StandInEvent:
    """Something in a side's stream."""

    def record(self, stream: object) -> None:
        self.behind = [(each, each.asked) for each in list(living) if each.rank == own_rank()]

    def query(self) -> bool:
        return all(each.done >= asked or each.gone.is_set() for each, asked in self.behind)


def synchronize(*device: object) -> None:
    """Until a side's stream is through, or all that is in it aborted."""
    event, pause = StandInEvent(), threading.Event()
    event.record(None)
    while not event.query():
        pause.wait(0.005)


class StandInGraph:
    """A CUDA graph: what is captured isn't done; ``replay`` does ``step``."""

    def __init__(self) -> None:
        self.step: Callable[[], None] = lambda: None

    def capture_begin(self, **how: str) -> None:
        CAPTURING.yes = True

    def capture_end(self) -> None:
        CAPTURING.yes = False

    def reset(self) -> None:
        pass

    def replay(self) -> None:
        self.step()


def install(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put them in the place of the real ones."""
    stream = types.SimpleNamespace(cuda_stream=0, query=lambda: True)
    counter = itertools.count()
    for name, value in {
        "Stream": lambda *args, **more: stream,
        "Event": StandInEvent,
        "CUDAGraph": StandInGraph,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "current_stream": lambda *device: stream,
        "is_current_stream_capturing": lambda: getattr(CAPTURING, "yes", False),
        "graph_pool_handle": lambda: next(counter),
        "synchronize": synchronize,
    }.items():
        patch(torch.cuda, name, value)
    patch(nccl, "Communicator", StandInCommunicator)
    patch(nccl, "new_id", new_id)
    patch(nccl.NcclBuffers, "create", staticmethod(StandInBuffers))

    def capture(self: GpuFfnConnector, peer: Any, rows: int) -> None:
        def step() -> None:
            for layer in peer.layers:
                peer.buffers.send(self._compute(layer, peer.buffers.receive(rows, layer)), layer)

        peer.graphs[rows] = StandInGraph()
        peer.graphs[rows].step = step
        self._freeze(True)

    patch(GpuFfnConnector, "_capture", capture)


def main() -> None:
    """An FFN server without vLLM: `python -m tests.runtime.nccl_stand_in CONFIG`. Rows of 13s are never answered."""
    import json
    import sys

    from afdpatch.runtime.config import AfdConfig
    from afdpatch.runtime.connectors.factory import gpu_ffn_connector
    from afdpatch.runtime.ffn_loop import FfnLoop
    from afdpatch.runtime.status import StatusPage

    from .test_nccl import LAYERS, greeting

    install()
    never = threading.Event()

    def compute(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        synchronize()  # a CPU computes at once
        if layer == LAYERS[1] and len(hidden) == 13:
            print("stuck", flush=True)
            never.wait()
        return hidden * (layer + 2)

    page = StatusPage.create("ffn")
    loop = FfnLoop(
        gpu_ffn_connector(AfdConfig.parse(json.loads(sys.argv[1])), 0, compute, lambda frozen: None, page),
        compute, page, greeting("ffn"),
    )  # fmt: skip
    loop.start()
    loop.serve()
    print("serving", os.getpid(), flush=True)
    never.wait()


if __name__ == "__main__":
    main()
