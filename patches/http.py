"""HTTP seam: AFD's metrics, health and status beside vLLM's own; an FFN server refuses requests, and drains."""

import functools
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from afdpatch.patches.attest import Attested
from afdpatch.runtime.metrics import health, render
from afdpatch.runtime.owner import process_space
from afdpatch.runtime.snapshot import PeerState, Snapshot
from afdpatch.runtime.status import StatusPages

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
STATUS = "/afd/status"
"""Where both roles tell what each of their workers' status pages says, as JSON."""
DRAIN, RESUME = "/afd/drain", "/afd/resume"
"""POST to an FFN server: let its peers go; take peers again."""
GENERATES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v2/chat",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/invocations",
)
"""Requests that need FFN servers; an attention server that has given up on them refuses these at once."""
RETRY_AFTER_S = 5
FFN_CONTROL = ("/collective_rpc",)
"""vLLM's development endpoint that reaches workers; vLLM itself has it only with VLLM_SERVER_DEV_MODE=1."""


def init_entrypoints_middleware(original: Callable[..., None]) -> Callable[..., None]:
    """Around `init_entrypoints_middleware`: adds `AfdMiddleware` outside of vLLM's own middleware."""

    @functools.wraps(original)
    def wrapper(args: "Namespace", app: "FastAPI", supported_tasks: tuple[Any, ...]) -> None:
        import vllm.envs

        original(args, app, supported_tasks)
        keys = [key for key in (args.api_key or [vllm.envs.VLLM_API_KEY]) if key]  # as the original reads them
        app.add_middleware(AfdMiddleware, api_keys=keys)

    return wrapper


class AfdMiddleware:
    """ASGI middleware of both roles. It reads the server's status pages and never waits for a worker.

    Args:
        app: what is inside.
        pages: the server's status pages (default: those of this process's environment).
        attested: what the server's processes have signed.
        api_keys: one of them, as a bearer token, is needed to drain; without any, only this host may.
    """

    def __init__(
        self,
        app: App,
        pages: StatusPages | None = None,
        attested: Attested | None = None,
        api_keys: Sequence[str] = (),
    ) -> None:
        pages = pages or StatusPages.from_environment()
        if pages is None:
            raise RuntimeError("no status page; this middleware belongs to a server with AFD on")
        self.app = app
        self.pages = pages
        self.attested = attested or Attested()
        self.api_keys = tuple(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") or "/"
        snapshots = self.pages.snapshots()
        if scope["type"] == "http" and path in (DRAIN, RESUME):
            return await self._drain(scope, send, path, snapshots[0].role)
        if snapshots[0].role == "ffn" and not _ffn_answers(scope, path):
            return await _refuse(scope, send)
        if path in GENERATES and _given_up(snapshots):
            return await self._unavailable(send, snapshots)
        if path == PROCESSES and scope["type"] == "http":
            return await _json(send, 200, self.attested.processes())
        if path == STATUS and scope["type"] == "http":
            return await self._status(send, snapshots)
        if path in ("/health", "/ping"):
            return await self._health(scope, receive, send, snapshots)
        if path == "/metrics":
            return await self._metrics(scope, receive, send, snapshots)
        return await self.app(scope, receive, send)

    async def _unavailable(self, send: Send, snapshots: Sequence[Snapshot]) -> None:
        message = f"{self._judge(snapshots)[1]}. Send the request again when a server is back."
        error = {"message": message, "type": "no_ffn_server", "param": None, "code": 503}
        await _json(send, 503, {"error": error}, (b"retry-after", str(RETRY_AFTER_S).encode()))

    async def _drain(self, scope: Scope, send: Send, path: str, role: str) -> None:
        if (refusal := self._may_not(scope, role)) is not None:
            status, message = refusal
            return await _json(send, status, {"error": {"message": message, "type": "afd_drain", "code": status}})
        self.pages.request_drain(path == DRAIN)
        return await self._status(send, self.pages.snapshots())

    def _may_not(self, scope: Scope, role: str) -> tuple[int, str] | None:
        """The status and the reason of a refusal, or None."""
        headers = dict(scope["headers"])
        if role != "ffn":
            return 409, "only an FFN server can be drained; this is an attention server: stop sending requests to it"
        if scope["method"] != "POST":
            return 405, f"found {scope['method']}; expected POST"
        # A page in a browser can't send this type to another origin without being asked for leave first.
        if headers.get(b"content-type", b"").split(b";")[0].strip() != b"application/json":
            return 415, "expected the header Content-Type: application/json"
        if self.api_keys:
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() == b"bearer" and any(hmac.compare_digest(token, key.encode()) for key in self.api_keys):
                return None
            return 401, "expected one of this server's API keys as a bearer token"
        client = scope.get("client")
        if client is not None and not _is_this_host(client[0]):
            return 403, "a server without an API key is drained from its own host only; give it --api-key, or go there"
        return None

    async def _status(self, send: Send, snapshots: Sequence[Snapshot]) -> None:
        now = monotonic()
        await _json(
            send,
            200,
            {
                "role": snapshots[0].role,
                "host": socket.gethostname(),
                "processes_of": process_space(),
                "pid": os.getpid(),
                "health": self._judge(snapshots)[1],
                "workers": [snapshot.describe(now) for snapshot in snapshots],
            },
        )

    def _judge(self, snapshots: Sequence[Snapshot]) -> tuple[bool, str]:
        fine, reason = health(snapshots, monotonic())
        if fine and (trouble := self.attested.trouble()) is not None:
            return False, f"{snapshots[0].role} server: its processes don't have the same patches: {trouble}"
        return fine, reason

    async def _health(self, scope: Scope, receive: Receive, send: Send, snapshots: Sequence[Snapshot]) -> None:
        fine, reason = self._judge(snapshots)
        if fine:
            return await self.app(scope, receive, send)
        return await _json(send, 503, {"status": "unhealthy", "role": snapshots[0].role, "reason": reason})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send, snapshots: Sequence[Snapshot]) -> None:
        """vLLM's own page with ours at its end."""
        ours = render(snapshots).encode()

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


def _is_this_host(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _given_up(snapshots: Sequence[Snapshot]) -> bool:
    """Whether every rank that sends hops has given up on its FFN servers."""
    states = {snapshot.peer_state for snapshot in snapshots} - {PeerState.NONE}
    return states == {PeerState.GIVEN_UP}


def _ffn_answers(scope: Scope, path: str) -> bool:
    if path in FFN_CONTROL:
        return True
    answers = (*FFN_ANSWERS, PROCESSES, STATUS)
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD", "OPTIONS") and path in answers


async def _refuse(scope: Scope, send: Send) -> None:
    message = (
        "This is an FFN server: it holds no KV cache and takes no requests. "
        'Send them to the attention server that it serves (the one started with the role "attention").'
    )
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
    return await _json(send, 421, {"error": {"message": message, "type": "ffn_server", "param": None, "code": 421}})


async def _json(send: Send, status: int, content: object, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
