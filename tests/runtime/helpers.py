"""What the runtime's tests share: greetings, conditions with deadlines, and FFN servers in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from afdpatch.runtime.connectors.base import AttentionConnector, FfnConnector, Unreachable
from afdpatch.runtime.connectors.shm import ShmAttentionConnector, ShmFfnConnector
from afdpatch.runtime.connectors.tcp import TcpAttentionConnector, TcpFfnConnector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.status import StatusPage

HIDDEN = 64
_numbers = itertools.count()
_ports: set[int] = set()
_monotonic = time.monotonic  # the real clock, for tests that simulate one
FAILING_LAYER = 1
HANGING_LAYER = 2
WRONG_SHAPE_LAYER = 3

Address = str | tuple[str, int]


def new_address(transport: str = "shm") -> Any:
    """An address that no other test uses: a name for shm, host and port for tcp."""
    if transport == "shm":
        return f"\0afdpatch-test/{os.getpid()}/{next(_numbers)}"
    return "127.0.0.1", free_port()


def free_port() -> int:
    """A port that nobody has, and that was given to nobody here before: the kernel may choose one again."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        if port not in _ports:
            _ports.add(port)
            return port


def ffn_connector(address: Address, **options: Any) -> FfnConnector:
    """The FFN side of an address, which says the transport."""
    return ShmFfnConnector(address, **options) if isinstance(address, str) else TcpFfnConnector(*address, **options)


def attention_connector(address: Address, **options: Any) -> AttentionConnector:
    """The attention side of an address, which says the transport."""
    kind = ShmAttentionConnector if isinstance(address, str) else TcpAttentionConnector
    return kind(*([address] if isinstance(address, str) else address), **options)


def greeting(role: str, **changes: Any) -> Greeting:
    fields: dict[str, Any] = {
        "role": role,
        "rank": 0,
        "manifest_digest": "aa11",
        "vllm_version": "0.30.0",
        "model": "tiny",
        "config_digest": "bb22",
        "checkpoint": "dd44",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "layers": (0, 1, 2, 3),
        "max_rows": 32,
        "micro_batches": 2,
        "num_attention_ranks": 2,
        "num_ffn_ranks": 1,
    }
    return Greeting(**{**fields, **changes})


def until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Wait for a condition; fail past the deadline."""
    pause = threading.Event()
    end = _monotonic() + deadline_s
    while not condition():
        if _monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        pause.wait(0.01)


def descriptors(pid: int) -> list[str]:
    """Sockets, pipes, shared memory and event counters that a process holds, without the files it reads for a moment.

    A thread opens some at its first use: let a peer come and go before the count that a later one is held against.
    """
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since the listing
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(link for link in links if link.startswith(("socket:", "pipe:", "/memfd:", "anon_inode:")))


def strike(pid: int, how: signal.Signals) -> None:
    """Kill or stop a child process, and wait until none of its threads runs any more."""

    def at_rest() -> bool:
        states = []
        with contextlib.suppress(OSError):  # it has gone
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    states.append((task / "stat").read_text().rpartition(") ")[2][0])
        return all(state in "TZX" for state in states)

    os.kill(pid, how)
    until(at_rest, f"process {pid} feels {how.name}")


def compute(layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """The tests' FFN: layer 1 raises, layer 2 hangs, layer 3 gives another shape."""
    if layer == FAILING_LAYER:
        raise ValueError("no such expert")
    if layer == HANGING_LAYER:
        threading.Event().wait(600)
    if layer == WRONG_SHAPE_LAYER:
        return hidden[:, :1]
    return hidden * 2 + layer


def _serve(
    address: Address, page_path: str, changes: dict[str, Any], serve: bool, options: dict[str, Any], function: Any
) -> None:
    page = StatusPage.open(page_path)
    page.set_worker()
    connector = ffn_connector(address, page=page, **options)
    own = greeting("ffn", **changes)
    # As a worker does it: a server whose loop has ended is none.
    loop = FfnLoop(connector, function, page, own, wrap=torch.inference_mode, on_death=lambda _: os._exit(1))
    signal.signal(signal.SIGUSR1, lambda *_: loop.serve())
    if serve:
        loop.serve()  # before anybody can greet it: nobody is told READY later
    loop.start()
    while True:
        threading.Event().wait(600)


@contextlib.contextmanager
def ffn_process(
    address: Address,
    page: StatusPage,
    *,
    serve: bool = True,
    wait: bool = True,
    options: dict[str, Any] | None = None,
    function: Callable[[int, torch.Tensor], torch.Tensor] = compute,
    **changes: Any,
) -> Iterator[BaseProcess]:
    """An FFN server in a process of its own; killed at the end. SIGUSR1 lets it serve.

    ``options`` are the connector's, ``changes`` the greeting's.
    """
    # A fresh interpreter that has torch already: a spawn for each test would take seconds.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", __name__])
    process = server.Process(
        target=_serve, args=(address, page.path, changes, serve, options or {}, function), daemon=True
    )
    process.start()
    try:
        if wait:
            until(lambda: page.snapshot().heartbeat_ns > 0, "the FFN server listens", 60)
        yield process
    finally:
        process.kill()
        process.join()


class Sender:
    """A connected attention side that numbers its hops."""

    def __init__(self, connector: AttentionConnector, hop_timeout_s: float) -> None:
        self.connector = connector
        self.hop_timeout_s = hop_timeout_s
        self.sequence = 0
        self.step = 0
        self._lock = threading.Lock()

    def hop(
        self, hidden: torch.Tensor, layer: int, micro_batch: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        with self._lock:  # numbers must go out in their order
            self.sequence += 1
            return self.connector.hop(
                hidden,
                layer,
                micro_batch,
                sequence=self.sequence,
                step=self.step,
                deadline_s=time.monotonic() + self.hop_timeout_s,
                out=out,
            )

    def wait_ready(self, deadline_s: float) -> None:
        self.connector.wait_ready(deadline_s)

    def peer_alive(self) -> bool:
        return self.connector.peer_alive()

    def close(self) -> None:
        self.connector.close()


@contextlib.contextmanager
def connected(
    address: Address, *, timeout_s: float = 30.0, hop_timeout_s: float = 60.0, **options: Any
) -> Iterator[Sender]:
    """A connected attention side; waits for a server that isn't there yet. ``greeting`` has the greeting's changes."""
    changes = options.pop("greeting", {})
    end = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        connector = attention_connector(address, **options)
        try:
            connector.connect(greeting("attention", **changes), end)
            break
        except Unreachable:
            connector.close()
            if time.monotonic() >= end:
                raise
            pause.wait(0.01)
        except BaseException:
            connector.close()
            raise
    try:
        yield Sender(connector, hop_timeout_s)
    finally:
        connector.close()
