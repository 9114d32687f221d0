"""The FFN side of the `ipc` connector."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from afdpatch.kernels import HopBuffers, HopCode, HopError
from afdpatch.kernels.layout import LayoutError
from afdpatch.runtime.connectors._ipc import ANNOUNCEMENT_BYTES, HANDLE_LIMIT, Announced, Announcement, HangUp
from afdpatch.runtime.connectors._memory import close_all, peer_user, readable, receive_message
from afdpatch.runtime.connectors.base import AddressInUse, FfnConnector, IncomingHop, InvalidHop
from afdpatch.runtime.protocol import (
    DTYPE_CODES,
    HEADER_BYTES,
    Greeting,
    Header,
    Kind,
    ProtocolError,
    Refusal,
    compare,
    control,
    error_message,
)
from afdpatch.runtime.status import StatusPage

_BACKLOG = 64
_GREETING_S = 10.0
log = logging.getLogger(__name__)

Compute = Callable[[int, Tensor], Tensor]


class _Peer:
    """A greeted attention rank: its socket, the buffers that are its own, and the graphs that were captured with it."""

    def __init__(self, sock: socket.socket, pid: int, greeting: Greeting, buffers: HopBuffers) -> None:
        self.sock = sock
        self.pid = pid
        self.rank = greeting.rank
        self.greeting = greeting
        self.buffers = buffers
        self.hang_up = HangUp(sock, buffers.abort)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.hops = 0


class IpcFfnConnector(FfnConnector):
    """Answers steps of attention ranks on GPUs of this host; see ``IpcAttentionConnector`` for the other side.

    A step is announced once. Eager, ``receive`` gives its hops one by one, each with rows that will be there when the
    stream gets to them; a step from a graph is replayed here as a whole. All launches go to the current stream.

    Args:
        address: of this FFN rank, from ``address_of``.
        compute: one layer's FFN, as the loop's; captured into graphs.
        freeze: called with True before the first graph is captured and with False when there is none any more: what
            graphs point at must not move meanwhile.
        hop_timeout_s: deadline of one wait on the GPU.
        page: counts peers, refusals, replayed steps and missing graphs there.
    """

    def __init__(
        self,
        address: str,
        compute: Compute,
        *,
        freeze: Callable[[bool], None] | None = None,
        hop_timeout_s: float = 60.0,
        page: StatusPage | None = None,
    ) -> None:
        self._address = address
        self._compute = compute
        self._freeze = freeze or (lambda frozen: None)
        self._hop_timeout_s = hop_timeout_s
        self._page = page
        self._greeting: Greeting | None = None
        self._listener: socket.socket | None = None
        self._wake_fd = -1
        self._wake_lock = threading.Lock()
        self._poll = select.poll()
        self._peers: dict[int, _Peer] = {}
        self._todo: deque[IncomingHop] = deque()
        self._serving_asked = False
        self._serving = False

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

    # Steps

    def receive(self, timeout_s: float) -> IncomingHop | None:
        if self._serving_asked and not self._serving:
            self._begin_serving()
        if not self._todo:
            self._look(timeout_s)
        while self._todo:
            hop = self._todo.popleft()
            peer = self._peers.get(hop.peer)
            if peer is not None:
                header = hop.header
                return hop._replace(hidden=peer.buffers.receive(header.rows, header.layer, header.micro_batch))
        return None

    def _look(self, timeout_s: float) -> None:
        """Take what the peers say, those that leave first; at most one step is begun."""
        for fd, event in sorted(self._poll.poll(timeout_s * 1000), key=lambda item: not item[1] & select.POLLRDHUP):
            peer = self._peers.get(fd)
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept(self._listener)
            elif peer is not None and (self._serving or event & ~select.POLLIN):
                self._read(fd, peer)
                if self._todo:
                    return

    def _read(self, fd: int, peer: _Peer) -> None:
        try:
            message = peer.sock.recv(HEADER_BYTES + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(fd, f"connection broke ({error})")
            return
        try:
            if len(message) == ANNOUNCEMENT_BYTES:
                self._begin(fd, peer, Announcement.unpack(message, peer.greeting.max_rows))
            elif not message:
                self._drop(fd, "connection closed without goodbye")
            elif Header.unpack(message).kind == Kind.BYE:
                self._drop(fd, None)
            else:
                raise ProtocolError("message", Header.unpack(message).kind, "an announcement or BYE")
        except ProtocolError as error:
            self._refused(f"attention rank {peer.rank} (process {peer.pid}): {error}")
            self._drop(fd, str(error))

    def _begin(self, fd: int, peer: _Peer, said: Announcement) -> None:
        status = peer.buffers.status()
        if status.code is not HopCode.OK:
            self._drop(fd, f"the last step failed on the GPU ({status})")
            return
        if said.kind is Announced.CAPTURE:
            self._capture(peer, said.rows)
            return
        layers, row_bytes = peer.greeting.layers, peer.buffers.geometry.row_bytes
        graph = peer.graphs.get(said.rows) if said.kind is Announced.GRAPH else None
        if graph is not None:
            graph.replay()
            peer.hops += len(layers)
            if self._page is not None:
                self._page.count_step()
                self._page.count_hops(len(layers), said.rows, said.rows * row_bytes)
            return
        if said.kind is Announced.GRAPH:
            text = f"no graph of {said.rows} rows for attention rank {peer.rank}: its step is computed eagerly"
            log.error("%s", text)
            if self._page is not None:
                self._page.count_error(text)
        dtype, hidden = DTYPE_CODES[peer.greeting.dtype], peer.greeting.hidden_size
        for layer in layers:
            peer.hops += 1
            nbytes = said.rows * row_bytes
            header = Header(Kind.HOP, dtype, peer.hops, said.step, layer, 0, said.rows, hidden, 0, nbytes)
            self._todo.append(IncomingHop(fd, header, peer.buffers.view(1)))

    def _capture(self, peer: _Peer, rows: int) -> None:
        """The other half of a graph that the attention server captured with so many rows."""
        if rows in peer.graphs:
            return
        if not any(other.graphs for other in self._peers.values()):
            self._freeze(True)
        started = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=peer.pool, capture_error_mode="thread_local"):
                for layer in peer.greeting.layers:
                    peer.buffers.send(self._compute(layer, peer.buffers.receive(rows, layer)).contiguous(), layer)
        except Exception as error:  # the steps of this size are computed eagerly, and counted as such
            log.exception("%d rows: the graph could not be captured", rows)
            if self._page is not None:
                self._page.count_error(f"no graph of {rows} rows: {type(error).__name__}: {error}")
            return
        peer.graphs[rows] = graph
        log.info("captured a graph of %d rows in %.2f s", rows, time.monotonic() - started)

    # Greeting

    def _accept(self, listener: socket.socket) -> None:
        """Greet whoever knocks, and exchange handles: some milliseconds, and not longer than the greeting may take."""
        assert self._greeting is not None
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        sock.settimeout(_GREETING_S)
        pid, uid = peer_user(sock)
        fds: list[int] = []
        buffers: HopBuffers | None = None
        try:
            if uid != os.getuid():
                raise _Refused(Refusal(f"process {pid} runs as user {uid}, expected {os.getuid()}"))
            message, fds = receive_message(sock)
            theirs = Greeting.decode(message)
            found = compare(self._greeting, theirs)
            if found:
                reason = f"attention rank {theirs.rank} doesn't fit this FFN server"
                raise _Refused(Refusal(reason, tuple(found)))
            taken = next((peer for peer in self._peers.values() if peer.rank == theirs.rank), None)
            if taken is not None:
                raise _Refused(Refusal(f"attention rank {theirs.rank} is connected already (process {taken.pid})"))
            own = replace(self._greeting, state="serving" if self._serving else "loading")
            sock.send(own.encode(), socket.MSG_NOSIGNAL)
            buffers = self._open(theirs, sock.recv(HANDLE_LIMIT))
            sock.send(buffers.handle(), socket.MSG_NOSIGNAL)
        except _Refused as refused:
            self._refuse(sock, refused.refusal)
        except (ProtocolError, LayoutError, HopError, OSError) as error:
            if buffers is not None:
                buffers.close()
            self._refuse(sock, Refusal(f"process {pid}: {error}"))
        else:
            peer = self._peers[sock.fileno()] = _Peer(sock, pid, theirs, buffers)
            self._poll.register(sock, self._interest())
            self._count_peers()
            log.info("attention rank %d (process %d) connected at %s", peer.rank, pid, readable(self._address))
        finally:
            close_all(fds)

    def _open(self, theirs: Greeting, handle: bytes) -> HopBuffers:
        buffers = HopBuffers.create(
            theirs.max_rows,
            theirs.hidden_size,
            theirs.dtype,
            theirs.micro_batches,
            torch.device("cuda", torch.cuda.current_device()),
            initiator=False,
            deadline_s=self._hop_timeout_s,
        )
        try:
            buffers.open(handle)
        except BaseException:
            buffers.close()
            raise
        return buffers

    def _interest(self) -> int:
        return select.POLLIN | select.POLLRDHUP if self._serving else select.POLLRDHUP

    def _begin_serving(self) -> None:
        self._serving = True
        for fd, peer in list(self._peers.items()):
            try:
                peer.sock.send(control(Kind.READY), socket.MSG_NOSIGNAL)
                self._poll.modify(fd, self._interest())
            except OSError as error:
                self._drop(fd, f"connection broke ({error})")

    def _refuse(self, sock: socket.socket, refusal: Refusal) -> None:
        self._refused("; ".join([refusal.reason, *map(str, refusal.mismatches)]))
        try:
            sock.send(refusal.encode(), socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("a refused process had gone: %s", error)
        sock.close()

    def _refused(self, text: str) -> None:
        log.error("%s: refused: %s", readable(self._address), text)
        if self._page is not None:
            self._page.count_refused(text)

    def _drop(self, fd: int, why: str | None) -> None:
        """End a connection; ``why`` is None after a goodbye. Nothing of it goes on on the GPU afterwards."""
        peer = self._peers.pop(fd)
        self._poll.unregister(fd)
        peer.buffers.abort()
        torch.cuda.synchronize()
        had_graphs = bool(peer.graphs)
        peer.graphs.clear()
        if had_graphs and not any(other.graphs for other in self._peers.values()):
            self._freeze(False)
        peer.hang_up.stop()
        peer.buffers.close()
        peer.sock.close()
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
        expected = (hop.header.rows, hop.header.hidden)
        if tuple(result.shape) != expected or result.dtype is not peer.buffers.dtype:
            raise InvalidHop(
                f"the FFN of layer {hop.header.layer} gave {result.dtype} {list(result.shape)}, "
                f"expected {peer.buffers.dtype} {list(expected)}"
            )
        peer.buffers.send(result.contiguous(), hop.header.layer, hop.header.micro_batch)

    def reply_error(self, hop: IncomingHop, text: str) -> None:
        """Tell the peer's host and end the connection: its GPU waits for an answer that won't come."""
        peer = self._peers.get(hop.peer)
        if peer is None:
            return
        try:
            peer.sock.send(error_message(hop.header, text), socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("attention rank %d had gone: %s", peer.rank, error)
        self._drop(hop.peer, text)

    def close(self) -> None:
        for fd, peer in list(self._peers.items()):
            try:
                peer.sock.send(control(Kind.BYE), socket.MSG_NOSIGNAL)
            except OSError as error:
                log.debug("attention rank %d had gone: %s", peer.rank, error)
            self._drop(fd, None)
        self._todo.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1


class _Refused(Exception):
    """A peer that isn't taken."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal
