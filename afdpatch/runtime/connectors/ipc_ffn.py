"""The FFN side of connectors between GPUs, and of `ipc`."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afdpatch.kernels import HopBuffers, HopCode, HopError
from afdpatch.kernels.layout import LayoutError
from afdpatch.runtime.connectors._ffn import SocketFfnConnector
from afdpatch.runtime.connectors._ipc import Announced, HandlePage, HangUp, geometry_of
from afdpatch.runtime.connectors._peer import QUIET, Peer, Pending
from afdpatch.runtime.connectors.base import MERGED_ROWS, IncomingHop, batches
from afdpatch.runtime.connectors.shm_ffn import ShmFfnConnector, ShmPending
from afdpatch.runtime.events import Event
from afdpatch.runtime.protocol import HEADER_BYTES, Greeting, Header, Kind, ProtocolError, control
from afdpatch.runtime.secret import Handshake
from afdpatch.runtime.status import StatusPage

log = logging.getLogger(__name__)

Compute = Callable[[int, Tensor], Tensor]


class GpuFfnConnector(SocketFfnConnector):
    """Answers steps of attention ranks on GPUs; see ``GpuAttentionConnector`` for the other side.

    A step is announced once, and steps are launched whole. Of an eager one ``receive`` gives the hops layer by layer,
    each with rows that will be there when the stream gets to them; with ``merge``, those of eager steps that were
    announced while others were launched come together as far as they are computed together. Such steps wait for each
    other. A step from a graph is replayed here, before eager ones that were announced meanwhile. All launches go to the
    current stream of the thread that calls ``receive``.

    A transport has its own `GpuPeer`, and sets the attributes.
    """

    _compute: Compute
    """One layer's FFN, as the loop's; captured into graphs."""
    _freeze: Callable[[bool], None]
    """Called with True before the first graph is captured and with False when there is none any more: what graphs
    point at must not move meanwhile."""
    _merge: bool
    _todo: deque[list[IncomingHop]]
    """Hops of eager steps that are under way: those of one layer, then those of the next."""

    # Steps

    def receive(self, timeout_s: float) -> list[IncomingHop]:
        if not self._todo:
            self._plan([said for said in super().receive(timeout_s) if self._begin(said)])
        while self._todo:
            hops = []
            for hop in self._todo.popleft():
                peer, header = self._numbers.get(hop.peer), hop.header
                if isinstance(peer, GpuPeer):
                    rows = peer.buffers.receive(header.rows, header.layer, header.micro_batch)
                    hops.append(hop._replace(hidden=rows))
            if hops:
                return hops
        return []

    @property
    def waiting(self) -> int:
        return sum(map(len, self._todo)) + super().waiting

    def _plan(self, said: list[IncomingHop]) -> None:
        """Put the hops of eager steps on the list, layer by layer."""
        assert self._greeting is not None
        # What is frozen for graphs has room for ``max_rows``.
        most = min(MERGED_ROWS, self._greeting.max_rows) if self._merge else 0
        for together in batches(said, most):
            for layer in self._greeting.layers:
                self._todo.append([s._replace(header=s.header._replace(layer=layer, offset=0)) for s in together])

    def _begin(self, said: IncomingHop) -> bool:
        """Launch what was announced, if it is no eager step; whether it is one."""
        peer, header = self._numbers.get(said.peer), said.header
        if not isinstance(peer, GpuPeer):
            return False
        status = peer.buffers.status()
        if status.code is not HopCode.OK:
            self._lose(peer, f"its last step failed on the GPU ({status})")
            return False
        what, rows, layers = Announced.of(header.offset), header.rows, peer.layers
        if what is not Announced.CAPTURE:
            peer.step_begins()
        if what is Announced.EAGER or (what is Announced.GRAPH and rows not in peer.graphs):
            if what is Announced.GRAPH:
                text = f"no graph of {rows} rows for attention rank {peer.rank}: such steps are computed eagerly"
                self._missing(text, say=rows not in peer.missing)
                peer.missing.add(rows)
            return True
        peer.unanswered.discard(header.micro_batch)
        if what is Announced.CAPTURE:
            self._capture(peer, rows)
            return False
        peer.graphs[rows].replay()
        peer.step_is_launched()
        if self._page is not None:
            self._page.count_step()
            self._page.count_hops(len(layers), rows, header.nbytes)
        return False

    def _capture(self, peer: GpuPeer, rows: int) -> None:
        """The other half of a graph that the attention server captures with so many rows."""
        if rows in peer.graphs:
            return
        first = not self._graphs()
        started = time.monotonic()
        try:
            if first:
                assert self._greeting is not None
                self._warm_up(peer, self._greeting.max_rows)  # no other peer has more
                self._freeze(True)
            self._warm_up(peer, rows)
            peer.graphs[rows] = self._record(peer, rows)
        except Exception as error:  # the steps of this size are computed eagerly, and counted as such
            log.exception("attention rank %d: a graph of %d rows can't be captured", peer.rank, rows)
            self._missing(f"no graph of {rows} rows: {type(error).__name__}: {error}")
            if first:
                self._freeze(False)
            return
        log.info(
            "attention rank %d: captured a graph of %d rows in %.2f s", peer.rank, rows, time.monotonic() - started
        )

    def _warm_up(self, peer: GpuPeer, rows: int) -> None:
        """Compute so many rows, spread over all experts, as a server that was started anew is asked for graphs first.

        What is loaded or compiled at first use must not be so in a capture; and with the most rows that can come, what
        grows with them grows before it is frozen.
        """
        like = peer.buffers.view(1)
        hidden = torch.randn(rows, like.shape[1], dtype=like.dtype, device=like.device)
        for layer in peer.layers:
            self._compute(layer, hidden)

    def _record(self, peer: GpuPeer, rows: int) -> torch.cuda.CUDAGraph:
        graph, buffers = torch.cuda.CUDAGraph(), peer.buffers
        with torch.cuda.graph(graph, pool=peer.pool, capture_error_mode="thread_local"):
            for layer in peer.layers:
                buffers.send(self._compute(layer, buffers.receive(rows, layer)).contiguous(), layer)
        return graph

    def _missing(self, text: str, *, say: bool = True) -> None:
        if say:
            log.error("%s", text)
        if self._page is not None:
            self._page.count(Event.ERROR, text)

    def _graphs(self) -> bool:
        return any(isinstance(peer, GpuPeer) and peer.graphs for peer in self._peers.values())

    def reply_error(self, hop: IncomingHop, text: str) -> None:
        """Tell the peer's host and end the connection: its GPU waits for an answer that won't come."""
        super().reply_error(hop, text)
        peer = self._numbers.get(hop.peer)
        if peer is not None:
            self._lose(peer, text)

    # The end

    def _let_go(self) -> None:
        """While draining: a goodbye to every peer; it leaves before its next step, or is left once nothing is owed.

        What it announced before it read the goodbye is computed: while some of that has arrived, or lies in the socket,
        or is on the GPU, it stays. While this server loads, only graphs can have been asked for: nothing is owed.
        """
        for peer in self._free():
            if isinstance(peer, GpuPeer) and not peer.let_go:
                peer.let_go = True
                self._send(peer, control(Kind.BYE))
            else:
                self._drop(peer)

    def _free(self) -> list[Peer]:
        """Peers that a goodbye is to be said to, or that nothing is owed to after it."""
        owed = {hop.peer for hop in (*(hop for hops in self._todo for hop in hops), *self._arrived)}
        free: list[Peer] = []
        for peer in self._peers.values():
            if isinstance(peer, GpuPeer) and not peer.let_go:
                free.append(peer)
                continue
            owes = self._serving and (peer.number in owed or peer.unanswered or self._unread(peer))
            if not owes and torch.cuda.current_stream().query():
                free.append(peer)
        return free

    @staticmethod
    def _unread(peer: Peer) -> bool:
        poll = select.poll()
        poll.register(peer.sock, select.POLLIN)
        return bool(poll.poll(0))

    def _lose(self, peer: Peer, why: str) -> None:
        if isinstance(peer, GpuPeer):
            peer.buffers.abort()
        super()._lose(peer, why)

    def _drop(self, peer: Peer) -> None:
        had_graphs = self._graphs()
        super()._drop(peer)
        if had_graphs and not self._graphs():
            self._freeze(False)


class GpuPeer(Peer):
    """A greeted attention rank: the buffers that are its own, and the graphs that were captured with it."""

    def __init__(self, pending: Pending, number: int, greeting: Greeting, buffers: Any) -> None:
        super().__init__(pending, number, greeting, inline=True)
        self.buffers = buffers
        self.layers = greeting.layers
        self.max_rows = greeting.max_rows
        self.hang_up = self.watch()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.missing: set[int] = set()  # sizes without a graph of which the log knows
        self.pool = torch.cuda.graph_pool_handle()
        self.let_go = False
        # One byte more than any message may have, so that a longer one shows.
        self._in = bytearray(HEADER_BYTES + 1)

    def watch(self) -> HangUp:
        """The watch over the peer."""
        return HangUp(self.sock, self.buffers.abort)

    def step_begins(self) -> None:
        """A step of this peer is launched from now on."""

    def step_is_launched(self) -> None:
        """Its last launch is in the current stream."""

    def message(self) -> Header | None:
        """The next whole message, not held against anything; as ``read`` otherwise."""
        try:
            length = self.sock.recv_into(self._in)
        except BlockingIOError:
            return None
        if not length:
            raise EOFError("end of the stream")
        if length != HEADER_BYTES:
            raise ProtocolError("message length", length, f"{HEADER_BYTES} bytes")
        return Header.unpack(self._in)

    def read(self) -> Header | None:
        header = self.message()
        if header is None or header.kind in QUIET:
            return header
        self._limits.check(header._replace(offset=0))
        # Steps are announced ahead of the GPU, so the one before need not be answered yet. Graphs that are captured
        # again for a new connection have no number.
        if Announced.of(header.offset) is not Announced.CAPTURE:
            if header.sequence <= self._last_sequence:
                raise ProtocolError("sequence", header.sequence, f"above {self._last_sequence}, the one before")
            self._last_sequence = header.sequence
        if header.layer != self.layers[0]:
            raise ProtocolError("layer", header.layer, f"{self.layers[0]}, the first")
        return header

    def hidden(self, header: Header) -> Tensor:
        rows: Tensor = self.buffers.view(header.rows)
        return rows

    def answer(self, header: Header, result: Tensor) -> None:
        self.buffers.send(result.contiguous(), header.layer, header.micro_batch)
        if header.layer == self.layers[-1]:
            self.step_is_launched()

    def send(self, message: bytes | bytearray) -> None:
        self.sock.send(message, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """What was launched ends first: by itself, by `HopBuffers.abort`, or at its deadline."""
        torch.cuda.synchronize(self.buffers.device)
        self.graphs.clear()
        self.hang_up.stop()
        super().close()
        self.buffers.close()


class _IpcPending(ShmPending):
    """A connection of this host; the page of handles comes with its greeting."""

    def __init__(
        self, sock: socket.socket, who: str, pid: int, handshake: Handshake, deadline_s: float, hop_timeout_s: float
    ) -> None:
        super().__init__(sock, who, pid, handshake, deadline_s)
        self._hop_timeout_s = hop_timeout_s

    def become_peer(self, number: int, greeting: Greeting) -> Peer:
        if len(self.fds) != 1:
            raise ProtocolError("descriptors", len(self.fds), "1, the memfd")
        page = HandlePage.attach(self.fds[0])
        self._close_fds()
        buffers: HopBuffers | None = None
        try:
            buffers = HopBuffers.create(
                greeting.max_rows,
                greeting.hidden_size,
                greeting.dtype,
                greeting.micro_batches,
                torch.device("cuda", torch.cuda.current_device()),
                initiator=False,
                deadline_s=self._hop_timeout_s,
                geometry=geometry_of(greeting),
            )
            buffers.open(page.get("attention"))
            page.put("ffn", buffers.handle())
        except torch.OutOfMemoryError as error:  # the servers that are served go on
            if buffers is not None:
                buffers.close()
            raise ProtocolError("max_rows", greeting.max_rows, "as many as this GPU has memory for") from error
        except (HopError, LayoutError) as error:
            if buffers is not None:
                buffers.close()
            raise ProtocolError("GPU buffers", str(error), "handles of buffers that this GPU reaches") from error
        finally:
            page.close()
        return GpuPeer(self, number, greeting, buffers)


class IpcFfnConnector(GpuFfnConnector, ShmFfnConnector):
    """Attention ranks on GPUs of this host.

    Args:
        address: of this FFN server, from ``address_of``.
        compute: one layer's FFN, as the loop's; captured into graphs.
        freeze: called with True before the first graph is captured and with False when there is none any more: what
            graphs point at must not move meanwhile.
        merge: whether eager steps of several peers are computed together.
        hop_timeout_s: deadline of one wait on the GPU.
        secret, page, peer_timeout_s: see ``SocketFfnConnector``.
    """

    def __init__(
        self,
        address: str,
        compute: Compute,
        *,
        freeze: Callable[[bool], None] | None = None,
        merge: bool = True,
        hop_timeout_s: float = 60.0,
        secret: bytes | None = None,
        page: StatusPage | None = None,
        peer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(address, secret=secret, page=page, peer_timeout_s=peer_timeout_s)
        self._compute = compute
        self._freeze = freeze or (lambda frozen: None)
        self._merge = merge
        self.hop_timeout_s = hop_timeout_s
        self._todo: deque[list[IncomingHop]] = deque()

    def _stranger(self, sock: socket.socket, who: str, pid: int, handshake: Handshake, deadline_s: float) -> ShmPending:
        return _IpcPending(sock, who, pid, handshake, deadline_s, self.hop_timeout_s)
