"""/health answers 503, with the reason, until every process of the server has attested the same patches."""

import asyncio
import json
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import afdpatch
from afdpatch.patches.attest import Attested
from afdpatch.patches.http import AfdMiddleware
from afdpatch.registry.attest import Roll
from afdpatch.runtime.status import State, StatusPage, StatusPages


class FakeSet:
    """Stands for this process's set."""

    def __init__(self) -> None:
        self.states = {"a": "applied"}

    def attest(self) -> dict[str, Any]:
        """What the API server's process says."""
        return said("api", 1) | {"states": dict(self.states)}


def said(process: str, pid: int, **changes: Any) -> dict[str, Any]:
    """What a process says."""
    return {
        "role": "ffn",
        "process": process,
        "processes": [process],
        "pid": pid,
        "start_method": "spawn",
        "digest": "d" * 64,
        "failure": None,
        "states": {"a": "applied"},
    } | changes


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A middleware over an app that is healthy, its roll, and the fake set."""
    page = StatusPage.create("ffn", "d" * 64)
    page.set_state(State.READY)
    page.beat()
    used = {kind: ["a"] for kind in ("api", "engine-core", "worker")}
    roll = Roll.create("test", role="ffn", digest="d" * 64, expected=dict.fromkeys(used, 1), used=used)
    fake = FakeSet()
    monkeypatch.setattr(afdpatch, "patchset", fake)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    return AfdMiddleware(app, StatusPages(page.path), Attested(roll)), roll, fake


def get(middleware: AfdMiddleware, path: str) -> tuple[int, Any]:
    """A GET's status and JSON."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    middleware.pages.pages[0].beat()
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_server_is_ready_when_all_have_attested_and_not_before(server: Any) -> None:
    middleware, roll, _ = server
    status, body = get(middleware, "/health")
    assert status == 503
    assert "engine-core: 0 of 1" in body["reason"] and "worker: 0 of 1" in body["reason"]
    roll.sign(said("engine-core", 2))
    assert "worker: 0 of 1" in get(middleware, "/ping")[1]["reason"]
    roll.sign(said("worker", 3))
    assert get(middleware, "/health")[0] == 200
    status, processes = get(middleware, "/afd/processes")
    assert status == 200
    assert [(item["process"], item["pid"]) for item in processes] == [
        ("engine-core", 2),
        ("worker", 3),
        ("api", 1),
    ] or [item["process"] for item in processes] == ["api", "engine-core", "worker"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "e" * 64}, "manifest eeee"),
        ({"role": "attention"}, "role attention"),
        ({"failure": "drifted"}, "drifted"),
        ({"states": {"a": "lost"}}, "'a' is lost"),
        ({"states": {}}, "'a' is absent"),
    ],
)
def test_a_worker_that_differs_is_named(server: Any, changes: dict[str, Any], words: str) -> None:
    middleware, roll, _ = server
    roll.sign(said("engine-core", 2))
    roll.sign(said("worker", 3) | changes)
    status, body = get(middleware, "/health")
    assert status == 503
    assert words in body["reason"] and "pid 3" in body["reason"]
    roll.sign(said("worker", 3))
    assert get(middleware, "/health")[0] == 200


def test_the_api_server_looks_at_itself_anew(server: Any) -> None:
    middleware, roll, fake = server
    roll.sign(said("engine-core", 2))
    roll.sign(said("worker", 3))
    assert get(middleware, "/health")[0] == 200
    fake.states = {"a": "lost"}
    assert "api (pid 1, spawn): patch 'a' is lost" in get(middleware, "/health")[1]["reason"]


def test_without_a_roll_a_server_is_not_ready(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    middleware, _, _ = server
    monkeypatch.delenv("AFDPATCH_ROLL", raising=False)
    middleware.attested = Attested()
    assert get(middleware, "/health")[0] == 503


def test_the_roll_is_read(server: Any, benchmark: BenchmarkFixture) -> None:
    middleware, roll, _ = server
    for pid in range(20):
        roll.sign(said("worker", pid))
    assert "have attested" in benchmark(middleware.attested.trouble)
