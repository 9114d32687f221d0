"""What the registry costs, and its budgets: `make bench` measures, holds each figure against its budget, writes JSON.

Elsewhere (`make test`) each case runs once and no time is looked at. Processes are measured as CPU time of children,
from bytecode. The import comes after what `import vllm.engine.arg_utils` does anyway; what counts is the difference to
a process that imports nothing more. The least of the rounds counts, since a busy machine only adds.
docs/registry.md has the figures.
"""

import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import wrapt
from pytest_benchmark.fixture import BenchmarkFixture

IMPORT_MS = 30.0
COMMAND_MS = 2000.0
VLLM = find_spec("vllm")
ROOT_OF_VLLM = str(Path(VLLM.origin).parents[1]) if VLLM and VLLM.origin else "vllm"
VLLM_LOADS = """
argparse ast asyncio collections.abc contextlib copy dataclasses dis enum functools gc hashlib importlib.metadata
importlib.resources importlib.util inspect json logging os pathlib pickle platform re subprocess tempfile threading
types typing uuid weakref zipfile
"""
"""Standard modules that vLLM's own import loads. It asks for versions too, which lists what is installed."""


def children_s() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def least_ms(benchmark: BenchmarkFixture, rounds: int, *command: str) -> float | None:
    """Measure a process; the least CPU time in milliseconds, or None where nothing is measured."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the first run writes the bytecode

    def run() -> None:
        subprocess.run([sys.executable, *command], check=True, capture_output=True, env=env, timeout=60)

    run()
    benchmark.pedantic(run, rounds=rounds)
    return None if benchmark.disabled else benchmark.stats.stats.min * 1e3


@pytest.fixture(scope="module")
def imports() -> dict[str, float]:
    """Least milliseconds of a process, by what it imports."""
    return {}


@pytest.mark.benchmark(group="a process that imports", timer=children_s)
@pytest.mark.parametrize("what", ["nothing", "wrapt", "afdpatch"])
def test_the_import(benchmark: BenchmarkFixture, imports: dict[str, float], what: str) -> None:
    program = f"import {', '.join(VLLM_LOADS.split())}\nimportlib.metadata.version('wrapt')\n"
    found = least_ms(benchmark, 15, "-c", program + ("" if what == "nothing" else f"import {what}"))
    if found is None:
        return
    imports[what] = found
    if what != "nothing":
        added = found - imports["nothing"]
        benchmark.extra_info |= {"added_ms": round(added, 1), "budget_ms": IMPORT_MS}
        assert added <= IMPORT_MS


COMMANDS = (
    ["verify"],
    ["verify", "--source", ROOT_OF_VLLM],
    ["verify", "--format", "sarif"],
    ["verify", "--format", "junit"],
    ["list"],
    ["explain", "http.middleware"],
    ["map"],
)


@pytest.mark.benchmark(group="a command", timer=children_s)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_a_command(benchmark: BenchmarkFixture, words: list[str]) -> None:
    found = least_ms(benchmark, 3, "-m", "afdpatch", *words)
    benchmark.extra_info |= {"budget_ms": COMMAND_MS}
    assert found is None or found <= COMMAND_MS


def plain(x: int) -> int:
    return x


def wrapped(original: Any) -> Any:
    def plain(x: int) -> int:
        return original(x)  # type: ignore[no-any-return]

    return plain


@pytest.mark.benchmark(group="a call", min_rounds=20)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(plain, id="plain"),
        pytest.param(lambda x: x, id="replaced"),
        pytest.param(wrapped(plain), id="wrapped"),
        pytest.param(wrapt.FunctionWrapper(plain, lambda f, _, args, kwargs: f(*args, **kwargs)), id="wrapt proxy"),
    ],
)
def test_a_call(benchmark: BenchmarkFixture, function: Any) -> None:
    assert benchmark(function, 1) == 1
