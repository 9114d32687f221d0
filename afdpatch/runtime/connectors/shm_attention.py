"""The attention side of the `shm` connector."""

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

from afdpatch.runtime.connectors._memory import HopMemory, peer_user, readable, receive_message, send_greeting
from afdpatch.runtime.connectors.base import (
    AttentionConnector,
    ConnectionRefused,
    ConnectTimeout,
    FfnError,
    GreetingMismatch,
    HopTimeout,
    InvalidHop,
    PeerLost,
)
from afdpatch.runtime.events import Event
from afdpatch.runtime.protocol import (
    DTYPE_CODES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_ERROR_BYTES,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    Kind,
    Layout,
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
_HOP, _REPLY, _ERROR = int(Kind.HOP), int(Kind.REPLY), int(Kind.ERROR)
_KIND_AT = 6  # of the byte in the header


class ShmAttentionConnector(AttentionConnector):
    """Hops through a sealed memfd that this side makes, announced by headers on a unix SOCK_SEQPACKET socket.

    Args:
        address: of the FFN rank, from ``address_of``.
        connect_timeout_s: how long ``connect`` and ``wait_ready`` try by default.
        hop_timeout_s: deadline of one hop once the FFN serves; while it loads, ``connect_timeout_s`` holds instead.
        spin_us: how long to look for the answer before sleeping, in microseconds.
        page: counts hops, peers and errors there.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 600.0,
        hop_timeout_s: float = 60.0,
        spin_us: int = 50,
        page: StatusPage | None = None,
    ) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._hop_timeout_s = hop_timeout_s
        self._spin_ns = spin_us * 1000
        self._page = page
        # Reentrant: a signal handler may close() the connector whose hop it interrupts.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._sock: socket.socket | None = None
        self._memory: HopMemory | None = None
        self._greeting: Greeting | None = None
        self._poll = select.poll()
        self._serving = False
        self._sequence = 1
        self._why_lost = "not connected yet"
        self._out = bytearray(HEADER_BYTES)
        self._expected = bytearray(HEADER_BYTES)
        # One byte more than any message may have, so that a longer one shows.
        self._in = bytearray(HEADER_BYTES + MAX_ERROR_BYTES + 1)

    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> Greeting:
        started = time.monotonic()
        deadline = started + self._connect_timeout_s if deadline_s is None else deadline_s
        message = greeting.encode()
        with self._lock:
            self._closing.clear()
            self._drop("connecting again")
            memory, fd = HopMemory.create(Layout.of(greeting))
            try:
                while True:
                    answered = self._try_connect(message, fd, deadline)
                    if answered is not None:
                        break
                    if time.monotonic() >= deadline:
                        raise ConnectTimeout(
                            f"no FFN server answered at {readable(self._address)} within "
                            f"{time.monotonic() - started:.1f} s; start it on this host with the same host and port, "
                            f"or raise connect_timeout_s"
                        )
                    if self._closing.wait(max(0.0, min(_RETRY_S, deadline - time.monotonic()))):
                        raise PeerLost(f"connecting to {readable(self._address)}: the connector was closed meanwhile")
                sock, answer = answered
                try:
                    theirs = self._accept(greeting, answer)
                except BaseException:
                    sock.close()
                    raise
            except BaseException:
                memory.close()
                raise
            finally:
                os.close(fd)
            self._sock, self._memory, self._greeting = sock, memory, greeting
            self._layers = frozenset(greeting.layers)
            self._dtype: torch.dtype = getattr(torch, greeting.dtype)
            self._code = DTYPE_CODES[greeting.dtype]
            self._serving = theirs.state == "serving"
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)
            if self._page is not None:
                self._page.set_peers(1)
            return theirs

    def _try_connect(self, message: bytes, fd: int, deadline: float) -> tuple[socket.socket, bytes] | None:
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
            send_greeting(sock, message, fd)
            answer, fds = receive_message(sock)
            for extra in fds:
                os.close(extra)
            if answer:
                sock.setblocking(False)
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
            if error.field == "protocol":
                mismatch = Mismatch("protocol", error.allowed, str(error.value))
                raise GreetingMismatch(
                    f"{where} doesn't fit: {mismatch}; run one afdpatch on both", [mismatch]
                ) from error
            raise ConnectionRefused(f"{where} gave no greeting: {error}; another program has this address") from error
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

    def hop(self, hidden: Tensor, layer: int, micro_batch: int = 0) -> Tensor:
        started = time.monotonic_ns()
        with self._lock:
            memory = self._check(hidden, layer, micro_batch)
            rows = hidden.shape[0]
            if not rows:
                return torch.empty_like(hidden)
            memory.a2f[micro_batch][:rows].copy_(hidden)
            layout = memory.layout
            width, nbytes = layout.hidden, rows * layout.row_bytes
            head = (MAGIC, PROTOCOL_VERSION)
            tail = (self._code, self._sequence, self.step, layer, micro_batch, rows, width)
            HEADER.pack_into(self._out, 0, *head, _HOP, *tail, layout.a2f_offset(micro_batch), nbytes)
            HEADER.pack_into(self._expected, 0, *head, _REPLY, *tail, layout.f2a_offset(micro_batch), nbytes)
            try:
                length = self._exchange(started, layer)
                if length != HEADER_BYTES or not self._in.startswith(self._expected):
                    self._not_a_reply(length, layer)
                result = memory.f2a[micro_batch][:rows].clone()
            except FfnError:
                self._sequence += 1
                raise
            except BaseException as error:
                # Whatever broke the wait (a signal too) leaves an answer on its way, so the connection has to go.
                self._drop(str(error) or type(error).__name__)
                if self._page is not None:
                    self._page.count(Event.ERROR, str(error) or type(error).__name__)
                raise
            self._sequence += 1
            if self._page is not None:
                self._page.count_hop(rows, nbytes, time.monotonic_ns() - started)
            return result

    def _check(self, hidden: Tensor, layer: int, micro_batch: int) -> HopMemory:
        memory = self._memory
        if memory is None:
            raise PeerLost(f"hop of layer {layer}: no connection to the FFN server: {self._why_lost}; connect again")
        layout = memory.layout
        if hidden.dim() != 2 or hidden.shape[1] != layout.hidden or hidden.shape[0] > layout.max_rows:
            raise InvalidHop(
                f"hop of layer {layer}: found shape {list(hidden.shape)}, "
                f"expected [0..{layout.max_rows}, {layout.hidden}]"
            )
        if hidden.dtype is not self._dtype or hidden.device.type != "cpu":
            raise InvalidHop(
                f"hop of layer {layer}: found {hidden.dtype} on {hidden.device}, expected {self._dtype} on cpu"
            )
        if layer not in self._layers:
            raise InvalidHop(f"hop of layer {layer}: expected a layer of the greeting: {sorted(self._layers)}")
        if not 0 <= micro_batch < layout.micro_batches:
            raise InvalidHop(
                f"hop of layer {layer}: found micro-batch {micro_batch}, expected 0..{layout.micro_batches - 1}"
            )
        return memory

    def _exchange(self, started_ns: int, layer: int) -> int:
        """Send the header in ``_out``, wait for the answer; its length, the answer being in ``_in``."""
        sock = self._sock
        assert sock is not None
        try:
            sock.send(self._out, socket.MSG_NOSIGNAL)
            length = self._receive(sock, started_ns, time.monotonic_ns() + self._spin_ns)
        except (OSError, EOFError, ProtocolError) as error:
            raise PeerLost(self._message(layer, started_ns, f"the FFN server has gone ({error})")) from error
        if length < 0:
            raise HopTimeout(self._message(layer, started_ns, "the FFN server did not answer in time"))
        return length

    def _message(self, layer: int, started_ns: int, what: str) -> str:
        waited = (time.monotonic_ns() - started_ns) / 1e9
        return (
            f"hop of layer {layer}, sequence {self._sequence}, at {readable(self._address)}: {what} after "
            f"{waited:.3f} s; look at that server's log, restart it if it has ended, and connect again"
        )

    def _receive(self, sock: socket.socket, started_ns: int, spin_until_ns: int) -> int:
        """Length of the next message, which lies in ``_in``; -1 past the deadline. READY is taken on the way.

        Raises:
            EOFError: the peer closed or said goodbye.
        """
        while True:
            length = self._receive_any(sock, started_ns, spin_until_ns)
            if length < 0:
                return length
            if not length:
                raise EOFError("connection closed")
            if length == HEADER_BYTES and self._in[_KIND_AT] > _ERROR:
                kind = Header.unpack(self._in).kind
                if kind == Kind.BYE:
                    raise EOFError("it said goodbye")
                if kind == Kind.READY:
                    self._serving = True
                    started_ns = time.monotonic_ns()  # the hop's own deadline counts from now on
                    continue
            return length

    def _receive_any(self, sock: socket.socket, started_ns: int, spin_until_ns: int) -> int:
        receive, buffer, now = sock.recv_into, self._in, time.monotonic_ns
        while True:
            try:
                return receive(buffer)
            except BlockingIOError:
                if now() >= spin_until_ns:
                    break
        while True:
            limit_s = self._hop_timeout_s if self._serving else self._connect_timeout_s
            left_ns = started_ns + int(limit_s * 1e9) - now()
            if left_ns <= 0:
                return -1
            if self._poll.poll(math.ceil(left_ns / 1e6)):
                try:
                    return receive(buffer)
                except BlockingIOError:
                    continue

    def _not_a_reply(self, length: int, layer: int) -> None:
        """Raise what the message in ``_in`` means, as it isn't the reply that this hop waits for."""
        try:
            header = Header.unpack(memoryview(self._in)[:length])
        except ProtocolError as error:
            raise PeerLost(
                f"hop of layer {layer}: the FFN server broke the protocol: {error}; connect again"
            ) from error
        if header.kind == Kind.ERROR and header.sequence == self._sequence and length < len(self._in):
            text = error_text(memoryview(self._in)[:length])
            if self._page is not None:
                self._page.count(Event.ERROR, text)
            raise FfnError(
                f"hop of layer {layer}, sequence {self._sequence}: the FFN server failed to compute it: {text}; "
                f"look at that server's log"
            )
        raise PeerLost(
            f"hop of layer {layer}: the FFN server broke the protocol: found {Kind(header.kind).name}, {length} bytes, "
            f"sequence {header.sequence}, layer {header.layer}, {header.rows} rows; "
            f"expected REPLY, sequence {self._sequence}; connect again"
        )

    def wait_ready(self, deadline_s: float | None = None) -> None:
        started = time.monotonic_ns()
        with self._lock:
            sock = self._sock
            if sock is None:
                raise PeerLost(f"no connection to the FFN server: {self._why_lost}; connect again")
            limit_s = self._connect_timeout_s if deadline_s is None else deadline_s - started / 1e9
            try:
                while not self._serving:
                    left_ms = math.ceil(limit_s * 1e3 - (time.monotonic_ns() - started) / 1e6)
                    if left_ms <= 0:
                        raise ConnectTimeout(
                            f"the FFN server at {readable(self._address)} is still loading after {limit_s:.1f} s; "
                            f"look at its log, or raise connect_timeout_s"
                        )
                    if self._poll.poll(left_ms):
                        self._take_ready(sock)
            except PeerLost as error:
                self._drop(str(error))
                raise

    def _take_ready(self, sock: socket.socket) -> None:
        """Read the message that waits while no hop is out: only READY may be there."""
        try:
            length = sock.recv_into(self._in)
            kind = Header.unpack(memoryview(self._in)[:length]).kind if length else Kind.BYE
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            raise PeerLost(f"the FFN server at {readable(self._address)} has gone ({error}); connect again") from error
        if kind != Kind.READY:
            raise PeerLost(
                f"the FFN server at {readable(self._address)} ended while it loaded; see its log; connect again"
            )
        self._serving = True

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

    def _drop(self, why: str) -> None:
        if self._sock is not None:
            self._why_lost = why
            self._sock.close()
            self._sock = None
            if self._page is not None:
                self._page.set_peers(0)
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        self._closing.set()
        sock = self._sock
        if sock is not None and not self._lock.acquire(blocking=False):
            # Another thread waits in a hop: end its wait.
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("closing %s: %s", readable(self._address), error)
        elif sock is not None:
            self._lock.release()
        with self._lock:
            if self._sock is not None:
                try:
                    self._sock.send(control(Kind.BYE), socket.MSG_NOSIGNAL)
                except OSError:
                    self._why_lost = "the peer had gone"  # nobody left to say goodbye to
            self._drop("closed")
