"""Real servers and engines for the end-to-end tests; each is started once and shared."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli.servers import Server, free_port, wait_all
from afdpatch.cli.topology import afd_pair, stock
from tests.e2e.servers import KEEP_GARBAGE, ONE_THREAD, OPTIONS, QUICK, until

ENGINE = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 27,
    "seed": 0,
}
"""vLLM's options of every engine that is compared with another."""
DEEPSEEK = "DeepseekV2ForCausalLM"
ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""The stock engine beside DeepSeek has vLLM's native rotary: the CPU build's op is wrong (compat.rotary)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts vLLM."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


def engine_options(architecture: str, dtype: str, **more: Any) -> dict[str, Any]:
    """The options of one engine."""
    options = ENGINE | {"dtype": dtype} | more
    if architecture == DEEPSEEK:  # on CPU vLLM fixes both for MLA
        options.pop("max_num_batched_tokens")
        options.pop("block_size")
    return options


def metrics(url: str) -> dict[str, float]:
    """A server's AFD metrics, summed over its workers: `name` or `name{label values}` -> value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := re.match(r"(afd_\w+)(?:\{(.*)\})? (\S+)$", line):
            labels = [
                value for key, value in re.findall(r'(\w+)="([^"]*)"', match[2] or "") if key not in ("role", "rank")
            ]
            name = match[1] + (f"{{{','.join(labels)}}}" if labels else "")
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


@contextmanager
def ffn_server(model: Path, dtype: str, logs: Path, *options: str) -> Iterator[tuple[Server, dict[str, Any]]]:
    """An FFN server of `model` whose FFNs the test can zero, and the `afd` configuration of its attention server."""
    afd_port = free_port()
    words = [str(model), "--dtype", dtype, "--max-model-len", "1024", *options]
    zeroable = ["--worker-cls", "tests.e2e.workers.SwitchableFFNWorker"]
    _, server = afd_pair(words, logs, afd_port=afd_port, ffn_options=zeroable)
    server.env |= ONE_THREAD
    with server:
        yield server, {"role": "attention", "port": afd_port}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """An attention and an FFN server, the attention server started first; a second attention server may come.

    Both are the real ones, with switches: tests/e2e/workers.py.
    """
    folder = tmp_path_factory.mktemp("pair")
    options = [*OPTIONS, "--attention-ranks", "2", "--afd-config", json.dumps(QUICK)]
    attention_options = ["--scheduler-cls", "tests.e2e.workers.SwitchableScheduler"]
    ffn_options = ["--worker-cls", "tests.e2e.workers.SwitchableFFNWorker"]
    attention, ffn = afd_pair(options, folder, attention_options=attention_options, ffn_options=ffn_options)
    for server in (attention, ffn):
        server.env |= ONE_THREAD
    attention.env[KEEP_GARBAGE] = str(folder / "keep-garbage")
    with attention:
        until(
            lambda: "waiting up to" in attention.log.path.read_text(),
            120,
            "the attention server waits for its FFN server",
        )
        with ffn:
            wait_all([attention, ffn], 300)
            yield attention, ffn


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stock vLLM."""
    server = stock(OPTIONS, tmp_path_factory.mktemp("stock"), binding={"VLLM_CPU_OMP_THREADS_BIND": "0"})
    server.env |= ONE_THREAD
    with server:
        server.wait_ready(300)
        yield server


def start_driver(spec: dict[str, Any], folder: Path, name: str) -> "subprocess.Popen[bytes]":
    """Start tests/e2e/driver.py on a spec; its log is `name`.log in `folder`."""
    (folder / f"{name}.spec.json").write_text(json.dumps(spec))
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.driver", f"{name}.spec.json", f"{name}.json"],
            cwd=folder,
            env={**os.environ, **ONE_THREAD},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish_driver(process: "subprocess.Popen[bytes]", folder: Path, name: str, timeout: float = 400) -> dict[str, Any]:
    """Wait for a driver and read what it saw; its log is shown when it failed."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        code = "none: it was killed at the deadline"
    if code != 0:
        log = (folder / f"{name}.log").read_text(errors="replace")
        pytest.fail(f"driver {name}: expected exit code 0, found {code}; the end of its log:\n{log[-4000:]}")
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


def drive(spec: dict[str, Any], folder: Path, name: str, timeout: float = 400) -> dict[str, Any]:
    """Run a driver to its end."""
    return finish_driver(start_driver(spec, folder, name), folder, name, timeout)


@dataclass
class Comparison:
    """What a stock engine and an AFD pair said to the same cases."""

    stock: dict[str, Any]
    afd: dict[str, Any]
    layers: int
    ffn_hops: float
    ffn: dict[str, float]
    ffn_parameters: dict[str, int]


def compare(path: Path, dtype: str, cases: list[str], folder: Path, **more: Any) -> Comparison:
    """Run the cases on both; the AFD pair runs them again with its FFNs zeroed."""
    config = json.loads((path / "config.json").read_text())
    layers, architecture = config["num_hidden_layers"], config["architectures"][0]
    engine = engine_options(architecture, dtype, **more)
    options = ["--enforce-eager"] if engine["enforce_eager"] else []
    options += ["--load-format", engine["load_format"]] if "load_format" in engine else []
    stock_engine = engine | (ROTARY if architecture == DEEPSEEK and engine["enforce_eager"] else {})
    with ffn_server(path, dtype, folder, *options) as (server, afd):
        spec = {"model": str(path), "cases": cases}
        local = {} if engine["enforce_eager"] else {"local_op": architecture}
        stock_process = start_driver(spec | local | {"engine": stock_engine}, folder, "stock")
        afd_spec = spec | {"engine": engine, "afd": afd, "zero_url": server.url}
        afd_process = start_driver(afd_spec, folder, "afd")
        try:
            server.wait_ready(300)
            stock = finish_driver(stock_process, folder, "stock")
            seen = finish_driver(afd_process, folder, "afd")
        finally:
            stock_process.kill()
            afd_process.kill()
        page = metrics(server.url)
        parameters = _own_parameters(server.url)
    return Comparison(stock, seen, layers, page["afd_hops_total"], page, parameters)


def _own_parameters(url: str) -> dict[str, int]:
    from tests.e2e.driver import rpc

    answer: dict[str, int] = rpc(url, "own_parameters")["results"][0]
    return answer
