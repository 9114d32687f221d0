"""The attention side of the `ipc` connector."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time

import torch
from torch import Tensor

from afdpatch.kernels import HopBuffers, HopCode
from afdpatch.runtime.connectors._ipc import HANDLE_LIMIT, Announced, Announcement, HangUp
from afdpatch.runtime.connectors._memory import peer_user, readable, receive_message
from afdpatch.runtime.connectors.base import (
    AttentionConnector,
    ConnectionRefused,
    ConnectTimeout,
    GreetingMismatch,
    HopTimeout,
    InvalidHop,
    PeerLost,
)
from afdpatch.runtime.protocol import (
    HEADER_BYTES,
    MAX_ERROR_BYTES,
    Greeting,
    Header,
    Kind,
    Mismatch,
    ProtocolError,
    Refusal,
    compare,
    control,
    decode_answer,
    error_text,
)
from afdpatch.runtime.status import StatusPage

_RETRY_S = 0.05
log = logging.getLogger(__name__)


class IpcAttentionConnector(AttentionConnector):
    """Hops from GPU to GPU of one host: a hop is a launch in the current stream, and no host waits for it.

    The FFN's host is told once a step (at its first layer, or before the replay of a graph) that a step of so many rows
    begins, and launches the other half of every layer. What went wrong on the way shows in `check`, once the results
    of the step have been waited for.

    Args:
        address: of the FFN rank, from ``address_of``.
        connect_timeout_s: how long ``connect`` and ``wait_ready`` try by default.
        hop_timeout_s: deadline of one wait on the GPU.
        page: counts steps, hops, peers and errors there.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 600.0,
        hop_timeout_s: float = 60.0,
        page: StatusPage | None = None,
    ) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._hop_timeout_s = hop_timeout_s
        self._page = page
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._sock: socket.socket | None = None
        self._hang_up: HangUp | None = None
        self._greeting: Greeting | None = None
        self._buffers: HopBuffers | None = None
        self._serving = False
        self._graphs: set[int] = set()
        self._steps = 0
        self._why_lost = "not connected yet"

    # Connecting

    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> Greeting:
        started = time.monotonic()
        deadline = started + self._connect_timeout_s if deadline_s is None else deadline_s
        with self._lock:
            self._closing.clear()
            self._drop("connecting again")
            buffers = self._own_buffers(greeting)
            while True:
                answered = self._try_connect(greeting, deadline)
                if answered is not None:
                    break
                if time.monotonic() >= deadline:
                    raise ConnectTimeout(
                        f"no FFN server answered at {readable(self._address)} within {time.monotonic() - started:.1f} s; "
                        f"start it on this host with the same host and port, or raise connect_timeout_s"
                    )
                if self._closing.wait(max(0.0, min(_RETRY_S, deadline - time.monotonic()))):
                    raise PeerLost(f"connecting to {readable(self._address)}: the connector was closed meanwhile")
            sock, answer = answered
            try:
                theirs = self._accept(greeting, answer)
                self._exchange_handles(sock, buffers, deadline)
                for rows in sorted(self._graphs, reverse=True):
                    sock.send(Announcement(Announced.CAPTURE, rows, self._steps).pack(), socket.MSG_NOSIGNAL)
            except BaseException:
                buffers.disconnect()
                sock.close()
                raise
            self._sock = sock
            self._serving = theirs.state == "serving"
            self._hang_up = HangUp(sock, buffers.abort)
            if self._page is not None:
                self._page.set_peers(1)
            return theirs

    def _own_buffers(self, greeting: Greeting) -> HopBuffers:
        """The buffers, which captured graphs name: made once, and forgotten only with the connector."""
        if self._buffers is None:
            self._buffers = HopBuffers.create(
                greeting.max_rows,
                greeting.hidden_size,
                greeting.dtype,
                greeting.micro_batches,
                torch.device("cuda", torch.cuda.current_device()),
                initiator=True,
                deadline_s=self._hop_timeout_s,
            )
            self._greeting = greeting
            self._first, self._layers = greeting.layers[0], frozenset(greeting.layers)
        return self._buffers

    def _try_connect(self, greeting: Greeting, deadline: float) -> tuple[socket.socket, bytes] | None:
        """The socket and the FFN's answer, or None when nobody is there yet."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(self._address)
            pid, uid = peer_user(sock)
            if uid != os.getuid():
                raise ConnectionRefused(
                    f"process {pid} at {readable(self._address)} runs as user {uid}, expected {os.getuid()}; "
                    f"run both servers as one user, or choose another port"
                )
            sock.send(greeting.encode(), socket.MSG_NOSIGNAL)
            answer, fds = receive_message(sock)
            for extra in fds:
                os.close(extra)
            if answer:
                return sock, answer
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, BlockingIOError, TimeoutError):
            pass  # nobody listens yet, or the listener ended while we spoke: the caller tries again until its deadline
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None

    def _accept(self, ours: Greeting, message: bytes) -> Greeting:
        where = f"the FFN server at {readable(self._address)}"
        try:
            answer = decode_answer(message)
        except ProtocolError as error:
            raise ConnectionRefused(f"{where} gave no greeting: {error}; run one afdpatch on both sides") from error
        if isinstance(answer, Refusal):
            # The FFN's own value comes first in its refusal.
            found = [Mismatch(field, ours=theirs, theirs=own) for field, own, theirs in answer.mismatches]
            if not found:
                raise ConnectionRefused(f"{where} refused this server: {answer.reason}")
        else:
            found = compare(ours, answer)
            if not found:
                return answer
        listed = "; ".join(map(str, found))
        raise GreetingMismatch(f"{where} doesn't fit this attention server: {listed}; start both alike", found)

    def _exchange_handles(self, sock: socket.socket, buffers: HopBuffers, deadline: float) -> None:
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.send(buffers.handle(), socket.MSG_NOSIGNAL)
            theirs = sock.recv(HANDLE_LIMIT)
        except OSError as error:
            raise PeerLost(f"{readable(self._address)}: the FFN server left during the greeting ({error})") from error
        if not theirs:
            raise PeerLost(f"{readable(self._address)}: the FFN server left during the greeting; see its log")
        buffers.open(theirs)
        buffers.reset()
        sock.settimeout(self._hop_timeout_s)

    def wait_ready(self, deadline_s: float | None = None) -> None:
        with self._lock:
            sock = self._sock
            if sock is None:
                raise PeerLost(f"no connection to the FFN server: {self._why_lost}; connect again")
            deadline = time.monotonic() + self._connect_timeout_s if deadline_s is None else deadline_s
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            while not self._serving:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ConnectTimeout(
                        f"the FFN server at {readable(self._address)} is still loading; look at its log, "
                        f"or raise connect_timeout_s"
                    )
                if poll.poll(math.ceil(left_s * 1000)):
                    message = self._told(sock)
                    if message is None or Header.unpack(message).kind != Kind.READY:
                        self._lose(f"the FFN server at {readable(self._address)} ended while it loaded; see its log")
                    self._serving = True

    def _told(self, sock: socket.socket) -> bytes | None:
        """The next message of the FFN's host if one is there."""
        try:
            message = sock.recv(HEADER_BYTES + MAX_ERROR_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        return message if len(message) >= HEADER_BYTES else None

    # Hops

    def hop(self, hidden: Tensor, layer: int, micro_batch: int = 0) -> Tensor:
        buffers = self._check_hop(hidden, layer)
        rows = hidden.shape[0]
        if layer == self._first:
            kind = Announced.CAPTURE if torch.cuda.is_current_stream_capturing() else Announced.EAGER
            self._announce(kind, rows)
        # A tensor of its own: a view of the slot would be overwritten by the next hop's reply.
        return buffers.exchange(hidden.contiguous(), layer, micro_batch, torch.empty_like(hidden))

    def begin_replay(self, rows: int) -> None:
        """To be called before a graph of ``rows`` rows is replayed: the FFN's host replays its half.

        Raises:
            PeerLost: there is no connection.
        """
        if rows not in self._graphs:
            raise InvalidHop(f"replay of {rows} rows: expected one of the captured graphs: {sorted(self._graphs)}")
        self._announce(Announced.GRAPH, rows)

    def check(self) -> None:
        """Whether the hops of the steps that have been waited for went well; a look at host memory.

        Raises:
            PeerLost, HopTimeout: what these steps returned is worthless; the connection was closed, connect again.
        """
        buffers = self._buffers
        if buffers is None or self._sock is None:
            return
        status = buffers.status()
        if status.code is HopCode.OK:
            return
        told = self._told(self._sock)
        why = error_text(told) if told and Header.unpack(told).kind == Kind.ERROR else str(status)
        if status.code is HopCode.DEADLINE:
            self._lose(f"no answer on the GPU within {self._hop_timeout_s:g} s ({why})", HopTimeout)
        self._lose(f"the FFN server has gone or failed ({why})")

    def _check_hop(self, hidden: Tensor, layer: int) -> HopBuffers:
        buffers = self._buffers
        if buffers is None or self._sock is None:
            raise PeerLost(f"hop of layer {layer}: no connection to the FFN server: {self._why_lost}; connect again")
        if layer not in self._layers:
            raise InvalidHop(f"hop of layer {layer}: expected a layer of the greeting: {sorted(self._layers)}")
        return buffers

    def _announce(self, kind: Announced, rows: int) -> None:
        with self._lock:
            sock = self._sock
            if sock is None:
                raise PeerLost(f"step: no connection to the FFN server: {self._why_lost}; connect again")
            if kind is Announced.CAPTURE:
                if rows in self._graphs:
                    return
                self._graphs.add(rows)
            else:
                self._steps += 1
            try:
                sock.send(Announcement(kind, rows, self._steps).pack(), socket.MSG_NOSIGNAL)
            except OSError as error:
                self._lose(f"the FFN server has gone ({error})")
            if self._page is not None and kind is not Announced.CAPTURE:
                assert self._greeting is not None and self._buffers is not None
                self._page.count_hops(len(self._layers), rows, rows * self._buffers.geometry.row_bytes)

    # The end

    def peer_alive(self) -> bool:
        sock = self._sock
        if sock is None:
            return False
        try:
            poll = select.poll()
            poll.register(sock, select.POLLRDHUP)
            return not poll.poll(0)
        except (OSError, ValueError):  # closed by another thread since
            return False

    def _lose(self, why: str, kind: type[PeerLost] = PeerLost) -> None:
        text = f"{readable(self._address)}: {why}; look at that server's log, restart it if it ended, and connect again"
        if self._page is not None:
            self._page.count_error(text)
        self._drop(why)
        raise kind(text)

    def _drop(self, why: str) -> None:
        """End the connection: no wait goes on on the GPU, and captured graphs run through without doing anything."""
        sock = self._sock
        if sock is None:
            return
        assert self._buffers is not None and self._hang_up is not None
        self._why_lost = why
        self._sock = None
        self._buffers.abort()
        self._buffers.disconnect()  # waits for the device
        self._hang_up.stop()
        sock.close()
        if self._page is not None:
            self._page.set_peers(0)

    def close(self) -> None:
        self._closing.set()
        sock = self._sock
        if sock is not None:
            try:
                sock.send(control(Kind.BYE), socket.MSG_NOSIGNAL)
            except OSError as error:
                log.debug("nobody left to say goodbye to: %s", error)
        with self._lock:
            self._drop("closed")
            if self._buffers is not None:
                self._buffers.close()
                self._buffers = None
                self._graphs.clear()
