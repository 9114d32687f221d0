"""What the runtime's tests share: greetings, conditions with deadlines, and an FFN server in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from afdpatch.runtime.connectors.shm import ShmAttentionConnector, ShmFfnConnector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.status import StatusPage

HIDDEN = 64
_numbers = itertools.count()
FAILING_LAYER = 1
HANGING_LAYER = 2
WRONG_SHAPE_LAYER = 3


def new_address() -> str:
    """An address that no other test uses."""
    return f"\0afdpatch-test/{os.getpid()}/{next(_numbers)}"


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
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        pause.wait(0.01)


def compute(layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """The tests' FFN: layer 1 raises, layer 2 hangs, layer 3 gives another shape."""
    if layer == FAILING_LAYER:
        raise ValueError("no such expert")
    if layer == HANGING_LAYER:
        threading.Event().wait(600)
    if layer == WRONG_SHAPE_LAYER:
        return hidden[:, :1]
    return hidden * 2 + layer


def _serve(address: str, page_path: str, changes: dict[str, Any], serve: bool) -> None:
    page = StatusPage.open(page_path)
    page.set_worker()
    connector = ShmFfnConnector(address, page=page, greeting_timeout_s=0.5)
    loop = FfnLoop(connector, compute, page, greeting("ffn", **changes), wrap=torch.inference_mode)
    loop.start()
    if serve:
        loop.serve()
    threading.Event().wait(600)


@contextlib.contextmanager
def ffn_process(
    address: str, page: StatusPage, *, serve: bool = True, wait: bool = True, **changes: Any
) -> Iterator[BaseProcess]:
    """An FFN server in a process of its own; killed at the end."""
    # A fresh interpreter that has torch already: a spawn for each test would take seconds.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", __name__])
    process = server.Process(target=_serve, args=(address, page.path, changes, serve), daemon=True)
    process.start()
    try:
        if wait:
            until(lambda: page.snapshot().heartbeat_ns > 0, "the FFN server listens", 60)
        yield process
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def connected(address: str, *, timeout_s: float = 30.0, **options: Any) -> Iterator[ShmAttentionConnector]:
    """A connected attention side."""
    changes = options.pop("greeting", {})
    connector = ShmAttentionConnector(address, **{"connect_timeout_s": timeout_s, **options})
    try:
        connector.connect(greeting("attention", **changes))
        yield connector
    finally:
        connector.close()
