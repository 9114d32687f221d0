"""/afd/status, /afd/drain and /afd/resume: who may ask, and what the worker's page then says."""

import asyncio
import json
from typing import Any

import pytest

from afdpatch.patches.attest import Attested
from afdpatch.patches.http import AfdMiddleware
from afdpatch.registry.attest import Roll
from afdpatch.runtime.status import PeerState, State, StatusPage, StatusPages

JSON = (b"content-type", b"application/json")


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'"vllm"'})


def server(role: str = "ffn", **options: Any) -> tuple[AfdMiddleware, StatusPage]:
    """A middleware over an app, and the first of its two workers' pages."""
    page = StatusPage.create(role, "d" * 64, ranks=2, first_rank=4)
    roll = Roll.create("test", role=role, digest="d" * 64, expected=(), used={})
    return AfdMiddleware(_app, StatusPages(page.path), Attested(roll), **options), page


def ask(
    middleware: AfdMiddleware,
    path: str,
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,),
    client: str | None = "127.0.0.1",
) -> tuple[int, Any]:
    """A request's status and JSON."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    scope["client"] = None if client is None else (client, 1)
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1", None])
def test_an_ffn_server_of_this_host_is_drained_and_resumed(client: str | None) -> None:
    middleware, page = server()
    status, body = ask(middleware, "/afd/drain", client=client)
    assert status == 200 and page.drain_requested
    assert [worker["drain_requested"] for worker in body["workers"]] == [True, True]
    assert [worker["rank"] for worker in body["workers"]] == [4, 5]
    assert ask(middleware, "/afd/resume", client=client)[0] == 200 and not page.drain_requested


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"method": "GET"}, 405),
        ({"headers": ()}, 415),
        ({"headers": ((b"content-type", b"text/plain"),)}, 415),
        ({"client": "10.0.0.7"}, 403),
        ({"client": "testclient"}, 403),
    ],
)
def test_who_may_not_drain_is_told_why_and_nothing_is_asked_of_the_worker(how: dict[str, Any], expected: int) -> None:
    middleware, page = server()
    status, body = ask(middleware, "/afd/drain", **how)
    assert status == expected == body["error"]["code"] and not page.drain_requested


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.7"])
def test_with_api_keys_one_of_them_is_needed_and_enough(client: str) -> None:
    middleware, page = server(api_keys=["one", "two"])
    for words in ((), ((b"authorization", b"Bearer three"),), ((b"authorization", b"two"),)):
        assert ask(middleware, "/afd/drain", headers=(JSON, *words), client=client)[0] == 401
    assert not page.drain_requested
    assert ask(middleware, "/afd/drain", headers=(JSON, (b"authorization", b"bearer two")), client=client)[0] == 200
    assert page.drain_requested


def test_an_attention_server_isnt_drained() -> None:
    middleware, page = server("attention")
    status, body = ask(middleware, "/afd/drain")
    assert status == 409 and "attention server" in body["error"]["message"] and not page.drain_requested


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_both_roles_tell_their_status(role: str) -> None:
    middleware, page = server(role)
    page.set_state(State.READY)
    page.set_error("the last one")
    status, body = ask(middleware, "/afd/status", "GET")
    assert status == 200 and body["role"] == role
    assert [worker["state"] for worker in body["workers"]] == ["ready", "starting"]
    assert body["workers"][0]["last_error"] == "the last one"
    assert "rank 4" in body["health"] or "rank 5" in body["health"]


def test_an_attention_server_that_has_given_up_refuses_new_requests_and_says_when_to_come_again() -> None:
    middleware, page = server("attention")
    page.set_state(State.READY)
    page.beat()
    for state in (PeerState.WAITING, PeerState.CONNECTED, PeerState.LOST):
        page.set_peer_state(state)
        assert ask(middleware, "/v1/completions") == (200, "vllm")  # requests wait for a server that is lost
    page.set_peer_state(PeerState.GIVEN_UP)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses/"):
        status, body = ask(middleware, path)
        assert status == 503
        assert "no FFN server came back" in body["error"]["message"]
    assert ask(middleware, "/tokenize") == (200, "vllm")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    assert (b"retry-after", b"5") in sent[0]["headers"]
