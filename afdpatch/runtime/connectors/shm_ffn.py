"""The FFN side of the `shm` connector."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from dataclasses import replace

from torch import Tensor

from afdpatch.runtime.connectors._memory import HopMemory, close_all, peer_user, readable, receive_message
from afdpatch.runtime.connectors.base import AddressInUse, FfnConnector, IncomingHop, InvalidHop
from afdpatch.runtime.events import Event
from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    HopLimits,
    Kind,
    Layout,
    Mismatch,
    ProtocolError,
    Refusal,
    compare,
    control,
    error_message,
)
from afdpatch.runtime.status import StatusPage

_BACKLOG = 64
_MAX_PENDING = 32
_REPLY = int(Kind.REPLY)
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
log = logging.getLogger(__name__)


class _Pending:
    """A connection that hasn't greeted yet."""

    def __init__(self, sock: socket.socket, pid: int, deadline_s: float) -> None:
        self.sock = sock
        self.pid = pid
        self.deadline_s = deadline_s


class _Peer:
    """A greeted attention rank."""

    def __init__(self, sock: socket.socket, pid: int, greeting: Greeting, memory: HopMemory) -> None:
        self.sock = sock
        self.pid = pid
        self.rank = greeting.rank
        self.memory = memory
        self.limits = HopLimits(greeting)


class ShmFfnConnector(FfnConnector):
    """Answers hops of any number of attention ranks; see ``ShmAttentionConnector`` for the other side.

    Args:
        address: of this FFN rank, from ``address_of``.
        spin_us: how long to look for the next hop before sleeping, in microseconds.
        page: counts peers and refusals there.
        greeting_timeout_s: a connection that hasn't greeted by then is dropped.
    """

    def __init__(
        self,
        address: str,
        *,
        spin_us: int = 50,
        page: StatusPage | None = None,
        greeting_timeout_s: float = 5.0,
    ) -> None:
        self._address = address
        self._spin_ns = spin_us * 1000
        self._page = page
        self._greeting_timeout_s = greeting_timeout_s
        self._greeting: Greeting | None = None
        self._listener: socket.socket | None = None
        self._wake_fd = -1
        self._wake_lock = threading.Lock()
        self._poll = select.poll()
        self._pending: dict[int, _Pending] = {}
        self._peers: dict[int, _Peer] = {}
        self._events: deque[tuple[int, int]] = deque()
        self._serving_asked = False
        self._serving = False
        self._in = bytearray(HEADER_BYTES + 1)
        self._out = bytearray(HEADER_BYTES)

    def listen(self, greeting: Greeting) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(self._address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise AddressInUse(
                f"cannot listen at {readable(self._address)}: {error.strerror}; expected a free address: stop the "
                f"other FFN server of this host with the same host, port and rank, or choose another port"
            ) from error
        self._greeting = greeting
        self._listener = listener
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def set_serving(self) -> None:
        self._serving_asked = True
        self.wake()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # Receiving

    def receive(self, timeout_s: float) -> IncomingHop | None:
        if self._serving_asked and not self._serving:
            self._begin_serving()
        events = self._events
        end_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        waited = False
        while True:
            while events:
                fd, event = events.popleft()
                peer = self._peers.get(fd)
                if peer is not None:
                    if self._serving:
                        hop = self._read(fd, peer)
                        if hop is not None:
                            return hop
                    elif event & _GONE:  # while loading, hops wait in the socket; only a peer that leaves matters
                        self._drop(fd, "left while this server loads")
                elif not self._other_event(fd):
                    return None
            # Events that bring no hop, however many, must not keep the caller's heart from beating.
            if waited and time.monotonic_ns() >= end_ns:
                return None
            found = self._wait(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
            if not found:
                return None
            events.extend(found)
            waited = True

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Events, after a short spin or a sleep; none past the timeout."""
        poll = self._poll.poll
        if self._pending:
            self._drop_silent()
        if self._peers and self._serving:
            spin_until_ns = time.monotonic_ns() + self._spin_ns
            while True:
                found = poll(0)
                if found:
                    return found
                if time.monotonic_ns() >= spin_until_ns:
                    break
        return poll(timeout_s * 1000)

    def _other_event(self, fd: int) -> bool:
        """Handle what isn't a peer's; False when somebody woke us."""
        assert self._listener is not None
        if fd == self._wake_fd:
            os.eventfd_read(fd)
            return False
        if fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd in self._pending:
            self._greet(fd)
        return True

    def _read(self, fd: int, peer: _Peer) -> IncomingHop | None:
        try:
            length = peer.sock.recv_into(self._in)
        except BlockingIOError:
            return None
        except OSError as error:
            self._drop(fd, f"connection broke ({error})")
            return None
        if not length:
            self._drop(fd, "connection closed without goodbye")
            return None
        try:
            if length != HEADER_BYTES:
                raise ProtocolError("message length", length, f"{HEADER_BYTES} bytes")
            header = Header.unpack(self._in)
            if header.kind == Kind.BYE:
                self._drop(fd, None)
                return None
            peer.limits.check(header)
        except ProtocolError as error:
            self._refused(f"attention rank {peer.rank} (process {peer.pid}): {error}")
            self._drop(fd, str(error))
            return None
        return IncomingHop(fd, header, peer.memory.a2f[header.micro_batch][: header.rows])

    # Greeting

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        sock.setblocking(False)
        pid, uid = peer_user(sock)
        if uid != os.getuid() or len(self._pending) >= _MAX_PENDING:
            reason = (
                f"process {pid} runs as user {uid}, expected {os.getuid()}; run both servers as one user"
                if uid != os.getuid()
                else f"process {pid}: {_MAX_PENDING} connections wait for their greeting already; try again later"
            )
            self._refuse(sock, Refusal(reason))
            return
        self._pending[sock.fileno()] = _Pending(sock, pid, time.monotonic() + self._greeting_timeout_s)
        self._poll.register(sock, select.POLLIN)

    def _greet(self, fd: int) -> None:
        assert self._greeting is not None
        pending = self._pending[fd]
        fds: list[int] = []
        memory: HopMemory | None = None
        try:
            try:
                message, fds = receive_message(pending.sock)
            except BlockingIOError:
                return
            if not message:
                raise ProtocolError("greeting", "a closed connection", "a JSON object")
            theirs = Greeting.decode(message)
            found = compare(self._greeting, theirs)
            if found:
                self._end_pending(
                    fd, Refusal(f"attention rank {theirs.rank} doesn't fit this FFN server", tuple(found))
                )
                return
            taken = self._connected(theirs.rank)
            if taken is not None:
                reason = f"attention rank {theirs.rank} is connected already (process {taken.pid})"
                advice = "give each pair a port of its own, or each attention server a rank of its own"
                self._end_pending(fd, Refusal(f"{reason}; {advice}"))
                return
            if len(fds) != 1:
                raise ProtocolError("descriptors", len(fds), "1, the memfd")
            memory = HopMemory.attach(fds[0], Layout.of(theirs))
            own = replace(self._greeting, state="serving" if self._serving else "loading")
            pending.sock.send(own.encode(), socket.MSG_NOSIGNAL)
        except ProtocolError as error:
            found = [Mismatch("protocol", error.allowed, str(error.value))] if error.field == "protocol" else []
            self._end_pending(fd, Refusal(f"process {pending.pid}: {error}", tuple(found)))
            return
        except OSError as error:
            if memory is not None:
                memory.close()
            self._end_pending(fd, Refusal(f"process {pending.pid} left during its greeting ({error})"))
            return
        finally:
            close_all(fds)
        del self._pending[fd]
        self._peers[fd] = _Peer(pending.sock, pending.pid, theirs, memory)
        self._poll.modify(fd, self._interest())
        self._count_peers()
        log.info("attention rank %d (process %d) connected at %s", theirs.rank, pending.pid, readable(self._address))

    def _connected(self, rank: int) -> _Peer | None:
        """The peer that has this rank; one that died is gone by now: its end was seen before this greeting."""
        return next((peer for peer in self._peers.values() if peer.rank == rank), None)

    def _interest(self) -> int:
        return select.POLLIN if self._serving else select.POLLRDHUP

    def _begin_serving(self) -> None:
        self._serving = True
        ready = control(Kind.READY)
        for fd, peer in list(self._peers.items()):
            try:
                peer.sock.send(ready, socket.MSG_NOSIGNAL)
                self._poll.modify(fd, self._interest())
            except OSError as error:
                self._drop(fd, f"connection broke ({error})")

    # Refusing and dropping

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for fd, pending in list(self._pending.items()):
            if now >= pending.deadline_s:
                reason = f"process {pending.pid} sent no greeting within {self._greeting_timeout_s:g} s"
                self._end_pending(fd, Refusal(reason))

    def _end_pending(self, fd: int, refusal: Refusal) -> None:
        pending = self._pending.pop(fd)
        self._poll.unregister(fd)
        self._refuse(pending.sock, refusal)

    def _refuse(self, sock: socket.socket, refusal: Refusal) -> None:
        text = "; ".join([refusal.reason, *map(str, refusal.mismatches)])
        self._refused(text)
        try:
            sock.send(refusal.encode(), socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("a refused process had gone: %s", error)
        sock.close()

    def _refused(self, text: str) -> None:
        log.error("%s: refused: %s", readable(self._address), text)
        if self._page is not None:
            self._page.count(Event.REFUSED, text)

    def _drop(self, fd: int, why: str | None) -> None:
        """End a connection and free its mapping; ``why`` is None after a goodbye."""
        peer = self._peers.pop(fd)
        self._poll.unregister(fd)
        peer.sock.close()
        peer.memory.close()
        self._count_peers()
        if why is None:
            log.info("attention rank %d (process %d) said goodbye", peer.rank, peer.pid)
        else:
            log.warning("attention rank %d (process %d) is lost: %s", peer.rank, peer.pid, why)

    def _count_peers(self) -> None:
        if self._page is not None:
            self._page.set_peers(len(self._peers))

    # Answering

    def reply(self, hop: IncomingHop, result: Tensor) -> None:
        peer = self._peers.get(hop.peer)
        if peer is None:
            return
        header, memory = hop.header, peer.memory
        region = memory.f2a[header.micro_batch][: header.rows]
        if result.shape != region.shape or result.dtype is not region.dtype:
            raise InvalidHop(
                f"the FFN of layer {header.layer} gave {result.dtype} {list(result.shape)}, "
                f"expected {region.dtype} {list(region.shape)}"
            )
        region.copy_(result)
        _, dtype, sequence, step, layer, micro_batch, rows, hidden, _, nbytes = header
        offset = memory.layout.f2a_offset(micro_batch)
        HEADER.pack_into(
            self._out, 0, MAGIC, PROTOCOL_VERSION, _REPLY,
            dtype, sequence, step, layer, micro_batch, rows, hidden, offset, nbytes,
        )  # fmt: skip
        self._send(hop.peer, peer, self._out)

    def reply_error(self, hop: IncomingHop, text: str) -> None:
        peer = self._peers.get(hop.peer)
        if peer is not None:
            self._send(hop.peer, peer, error_message(hop.header, text))

    def _send(self, fd: int, peer: _Peer, message: bytes | bytearray) -> None:
        try:
            peer.sock.send(message, socket.MSG_NOSIGNAL)
        except OSError as error:  # gone, or it lets its answers pile up
            self._drop(fd, f"the answer could not be sent ({error})")

    def close(self) -> None:
        goodbye = control(Kind.BYE)
        for fd, peer in list(self._peers.items()):
            try:
                peer.sock.send(goodbye, socket.MSG_NOSIGNAL)
            except OSError as error:
                log.debug("attention rank %d had gone: %s", peer.rank, error)
            self._drop(fd, None)
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        self._events.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
