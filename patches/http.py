"""HTTP seam: AFD's metrics and health beside vLLM's own, and the FFN server's refusal of requests."""

import functools
import json
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from afdpatch.patches.attest import Attested
from afdpatch.runtime.metrics import health, render
from afdpatch.runtime.status import Snapshot, StatusPage

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FFN_ANSWERS = (
    "/health",
    "/ping",
    "/metrics",
    "/version",
    "/load",
    "/v1/models",
    "/server_info",
    "/docs",
    "/openapi.json",
)
"""What an FFN server answers to GET and HEAD; everything else needs an attention server."""
PROCESSES = "/afd/processes"
"""Where both roles tell what each of their processes has attested, as JSON."""
FFN_CONTROL = ("/collective_rpc",)
"""vLLM's development endpoint that reaches workers; vLLM itself has it only with VLLM_SERVER_DEV_MODE=1."""


def init_entrypoints_middleware(original: Callable[..., None]) -> Callable[..., None]:
    """Around `init_entrypoints_middleware`: adds `AfdMiddleware` outside of vLLM's own middleware."""

    @functools.wraps(original)
    def wrapper(args: "Namespace", app: "FastAPI", supported_tasks: tuple[Any, ...]) -> None:
        original(args, app, supported_tasks)
        app.add_middleware(AfdMiddleware)

    return wrapper


class AfdMiddleware:
    """ASGI middleware of both roles. It reads the server's status page and never waits for a worker."""

    def __init__(self, app: App, page: StatusPage | None = None, attested: Attested | None = None) -> None:
        page = page or StatusPage.from_environment()
        if page is None:
            raise RuntimeError("no status page; this middleware belongs to a server with AFD on")
        self.app = app
        self.page = page
        self.attested = attested or Attested()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") or "/"
        snapshot = self.page.snapshot()
        if snapshot.role == "ffn" and not _ffn_answers(scope, path):
            return await _refuse(scope, send)
        if path == PROCESSES and scope["type"] == "http":
            return await _json(send, 200, self.attested.processes())
        if path in ("/health", "/ping"):
            return await self._health(scope, receive, send, snapshot)
        if path == "/metrics":
            return await self._metrics(scope, receive, send, snapshot)
        return await self.app(scope, receive, send)

    async def _health(self, scope: Scope, receive: Receive, send: Send, snapshot: Snapshot) -> None:
        fine, reason = health(snapshot, monotonic())
        if fine and (trouble := self.attested.trouble()) is not None:
            fine, reason = False, f"{snapshot.role} server: its processes don't have the same patches: {trouble}"
        if fine:
            return await self.app(scope, receive, send)
        return await _json(send, 503, {"status": "unhealthy", "role": snapshot.role, "reason": reason})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send, snapshot: Snapshot) -> None:
        """vLLM's own page with ours at its end."""
        ours = render(snapshot).encode()

        async def with_ours(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                message["headers"] = [h for h in message["headers"] if h[0].lower() != b"content-length"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                message["body"] = message.get("body", b"") + ours
            await send(message)

        # Neither compressed nor in OpenMetrics, whose end mark would stand before our part.
        negotiated = (b"accept", b"accept-encoding")
        plain = scope | {"headers": [h for h in scope["headers"] if h[0].lower() not in negotiated]}
        await self.app(plain, receive, with_ours)


def _ffn_answers(scope: Scope, path: str) -> bool:
    if path in FFN_CONTROL:
        return True
    answers = (*FFN_ANSWERS, PROCESSES)
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS") and path in answers


async def _refuse(scope: Scope, send: Send) -> None:
    message = (
        "This is an FFN server: it holds no KV cache and takes no requests. "
        'Send them to the attention server that it serves (the one started with the role "attention").'
    )
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
    return await _json(send, 421, {"error": {"message": message, "type": "ffn_server", "param": None, "code": 421}})


async def _json(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
