"""HTTP servers of the end-to-end tests: the options that they share, and what a client does with them."""

import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli.servers import Server, children, free_port
from afdpatch.cli.topology import SERVER_ENV

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
MODEL = MODELS / "qwen3-moe"
OPTIONS = [
    *(str(MODEL), "--served-model-name", "m", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "1024"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 27), "--block-size", "32"),
    *("--max-num-batched-tokens", "128"),
]
LAYERS = 4
PROMPT = "The :func:`open` function returns"
QUICK = {"connector_extra_config": {"hop_timeout_s": 10, "recovery_timeout_s": 10}}
"""An attention server that gives up on its FFN servers soon."""

KEEP_GARBAGE = "AFD_TEST_KEEP_GARBAGE"
"""Names a file; while it exists, a lost step's blocks stay in the prefix cache (tests/e2e/workers.py)."""


def server(name: str, options: list[str], logs: Path, afd: dict[str, Any] | None = None, cores: str = "0") -> Server:
    """A vLLM server, with AFD if it is told so, by the plain command of a user on its host; not started yet.

    Args:
        name: of the server and its log.
        options: vLLM's, the model first.
        logs: the folder of its log.
        afd: `additional_config["afd"]`; None for stock vLLM.
        cores: one list for each worker, as VLLM_CPU_OMP_THREADS_BIND has them.
    """
    port = free_port()
    command = [sys.executable, "-m", "afdpatch", "vllm", "serve", *options, "--port", str(port)]
    if afd is not None:
        command += ["--additional-config", json.dumps({"afd": afd})]
    env = {**SERVER_ENV, **ONE_THREAD, "VLLM_CPU_OMP_THREADS_BIND": cores}
    return Server(name, command, port, logs / f"{name}.log", env=env)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    tick = threading.Event()
    while time.monotonic() < deadline:
        if found := condition():
            return found
        tick.wait(0.1)
    pytest.fail(f"expected within {seconds:g} s: {what}")


GONE = ("", "Z", "X")
"""The states of a process that runs no more; a container's first process may never collect a zombie."""


def state(pid: int) -> str:
    """A process's state, the letter in /proc: R, S, D, T, Z, ...; nothing once it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def processes_below(pid: int) -> set[int]:
    """All descendants of a process."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found.update(below)
        todo += below
    return found


def ask(server: Server, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    """POST a completion; status and JSON."""
    content = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 3,
        "ignore_eos": True,
    } | body
    request = urllib.request.Request(
        server.url + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def stream(server: Server, stop_after: int | None = None, **body: Any) -> list[tuple[str, float]]:
    """Stream a completion: (token, log-probability) of each; hangs up after `stop_after` tokens."""
    content = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 48,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    } | body
    connection = HTTPConnection(server.host, server.port, timeout=120)
    connection.request(
        "POST", "/v1/completions", json.dumps(content | {"stream": True}), {"Content-Type": "application/json"}
    )
    found: list[tuple[str, float]] = []
    response = connection.getresponse()
    assert response.status == 200
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            if choice.get("logprobs"):
                found += zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
        if stop_after is not None and len(found) >= stop_after:
            break
    connection.close()
    return found


def said(answer: Any) -> Any:
    """What a completion says, without its id and time."""
    return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in answer["choices"]]


BOUND = 0.05
"""Of a log-probability, where the host's FFN gives a row other bits beside other rows."""


def rows_are_alike(ffn: Server) -> bool:
    """Whether this host's FFN gives a row the same bits whatever else is in the batch. The server must be at rest."""
    from tests.e2e.driver import rpc

    return bool(rpc(ffn.url, "rows_are_alike", 64)["results"][0])


def same(found: list[Any], expected: list[Any], alike: bool) -> bool:
    """Whether choices are equal: to the bit where rows are alike on this host, else within the bound."""
    if alike:
        return found == expected
    for (_, logprobs, _), (_, others, _) in zip(found, expected, strict=True):
        for value, other in zip(logprobs["token_logprobs"], others["token_logprobs"], strict=True):
            if not math.isclose(value, other, abs_tol=BOUND):
                return False
    return True
