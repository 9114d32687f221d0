"""The attention side of connectors between GPUs, and of `ipc`."""

from __future__ import annotations

import functools
import os
import select
import socket
import time
from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from afdpatch.kernels import HopBuffers, HopCode, HopError
from afdpatch.kernels.layout import LayoutError
from afdpatch.runtime.connectors._attention import SocketAttentionConnector
from afdpatch.runtime.connectors._ipc import Announced, HandlePage, HangUp, geometry_of
from afdpatch.runtime.connectors._memory import send_greeting
from afdpatch.runtime.connectors.base import (
    ConnectionRefused,
    ConnectorError,
    FfnError,
    HopTimeout,
    InvalidHop,
    PeerLost,
    StepLost,
    Unreachable,
)
from afdpatch.runtime.connectors.shm_attention import ShmAttentionConnector
from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    Kind,
    ProtocolError,
)

_HOP = int(Kind.HOP)
_TEXT_NS = 1_000_000_000
"""How long the text behind an ERROR may take."""


class Replay:
    """Stands where a step's first hidden states would: a graph of ``rows`` rows is about to be replayed."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


class StaleGraph(ConnectorError):
    """A graph can't be replayed any more: it was captured over a connection that has gone. The step goes eagerly."""


class GpuEnd:
    """The attention rank's buffers on its GPU, and the sizes of the graphs that name them.

    It outlives connections: captured graphs go on with the buffers of whatever FFN server is connected next.

    Args:
        hop_timeout_s: deadline of one wait on the GPU.
        kind: class of the buffers, `HopBuffers` or one that does the same.
        uniform: whether both halves of a step are replayed from graphs or none, as NCCL wants its calls: captured on
            all ranks or on none.

    Attributes:
        graphs: sizes of the graphs that name these buffers, with all hops of a step in them.
        pieces: sizes of the steps of which all but the hops is replayed: only their other half hops in a graph.
        under_way: the connection on which the last step was announced.
        stale: whether graphs were captured over a connection that has gone, and can't go on with another.
    """

    def __init__(self, hop_timeout_s: float, kind: type[Any] | None = None, *, uniform: bool = False) -> None:
        self.hop_timeout_s = hop_timeout_s
        self.uniform = uniform
        self.buffers: Any = None
        self.graphs: set[int] = set()
        self.pieces: set[int] = set()
        self.under_way: GpuAttentionConnector | None = None
        self.stale = False
        self._kind = kind

    def make(self, greeting: Greeting) -> Any:
        """The buffers, made at the first call on the current device.

        Raises:
            Unreachable: a connection uses them. ConnectionRefused: such rows can't travel so.
        """
        if self.buffers is None:
            kind: Any = self._kind or HopBuffers
            try:
                more = {} if self._kind else {"geometry": geometry_of(greeting)}
            except LayoutError as error:
                raise ConnectionRefused(f"this model's hidden states can't travel between GPUs: {error}") from error
            self.buffers = kind.create(
                greeting.max_rows,
                greeting.hidden_size,
                greeting.dtype,
                greeting.micro_batches,
                torch.device("cuda", torch.cuda.current_device()),
                initiator=True,
                deadline_s=self.hop_timeout_s,
                **more,
            )
        elif self.buffers.connected:
            raise Unreachable("the buffers on the GPU are in use by another connection")
        return self.buffers


class GpuAttentionConnector(SocketAttentionConnector):
    """Hops from GPU to GPU: a hop is launched in the current stream, and no host waits for it.

    The FFN's host is told once a step (at its first layer, or before the replay of a graph) that a step of so many rows
    begins, and launches the other half of every layer. What went wrong on the way shows in `failure`, once the results
    of the step have been waited for. A transport says how the two GPUs meet.
    """

    _end: GpuEnd
    """This rank's buffers; one connection at a time uses them."""
    _hang_up: HangUp | None = None
    _begun = False
    _leaves = False
    _ended_well = False
    _failed: str | None = None  # what the FFN's host couldn't compute

    @abstractmethod
    def _meet(self, sock: socket.socket, deadline_s: float) -> None:
        """Open the buffers to the peer's and start the watch over it. Raises ConnectorError, and then drops."""

    def _step_begins(self) -> None:
        """The step that was announced is launched from now on."""

    def _step_is_launched(self) -> None:
        """Its last launch is in the current stream."""

    # Connecting

    def connect(self, greeting: Greeting, deadline_s: float) -> Greeting:
        with self._lock:
            theirs = super().connect(greeting, deadline_s)
            assert self._sock is not None
            self._first, self._last = greeting.layers[0], greeting.layers[-1]
            self._meet(self._sock, deadline_s)
            self._halves: set[int] = set()  # sizes of which the FFN's host was told to capture its half
            # The largest first: the others' tensors find room in its memory. Those wait for a step that wants them: a
            # step that waited for all of them might take longer than a hop may.
            for rows in sorted(self._end.graphs | self._end.pieces)[-1:]:
                self._want_half(rows, deadline_s)
            return theirs

    # Hops

    def hop(
        self,
        hidden: Tensor | Replay,
        layer: int,
        micro_batch: int = 0,
        *,
        sequence: int,
        step: int,
        deadline_s: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """As the contract has it, but nothing has been waited for when it returns.

        A `Replay` at the first layer announces the replay of a graph; what is returned means nothing then. A hop of a
        later layer whose step began on another connection raises `StepLost`.
        """
        with self._lock:
            if layer == self._first:
                if not isinstance(hidden, Replay) and self._sock is not None:
                    # The other half of what is announced would wait for rows that can't be launched.
                    self._check_rows(hidden, layer, out, torch.device(self._end.buffers.device), 1)
                self._announce(hidden, sequence, step, deadline_s)
            if isinstance(hidden, Replay):
                return torch.empty(0)  # `replayed` follows
            if self._sock is None or not self._begun:
                raise StepLost(f"hop of layer {layer}: the step's connection to {self.where} is lost: {self._why_lost}")
            if layer not in self._layers:
                raise InvalidHop(f"hop of layer {layer}: expected a layer of the greeting: {sorted(self._layers)}")
            buffers = self._end.buffers
            assert buffers is not None
            if out is None:  # a view of the slot would be overwritten by the next hop's reply
                out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            result: Tensor = buffers.exchange(hidden.contiguous(), layer, micro_batch, out)
            if layer == self._last and not torch.cuda.is_current_stream_capturing():
                self._step_is_launched()
            return result

    def capture_other_half(self, rows: int, deadline_s: float) -> None:
        """Have the FFN's host capture its half of steps of so many rows.

        Raises:
            PeerLost: the connection has gone. HopTimeout: nothing could be said by the deadline.
        """
        with self._lock:
            self._check_there()
            self._want_half(rows, deadline_s)

    def hold(self, rows: int) -> None:
        """Keep this connection, gone or not, until `replayed`: a graph isn't launched over the next one, unannounced.

        Raises:
            StepLost: it has been closed since the replay was announced.
        """
        self._lock.acquire()
        if self._sock is None:
            self._lock.release()
            raise StepLost(f"replay of {rows} rows: the step's connection to {self.where} is lost: {self._why_lost}")

    def replayed(self) -> None:
        """The graph whose replay was announced is in the current stream."""
        if self._sock is not None:
            self._step_is_launched()
        self._lock.release()

    def graphs_stand(self) -> bool:
        """Whether graphs that were captured over this connection may be replayed, now or over the next one."""
        return True

    def _announce(self, hidden: Tensor | Replay, sequence: int, step: int, deadline_s: float) -> None:
        rows = len(hidden)
        self._check_there()
        self._listen_in()
        if isinstance(hidden, Replay):
            if self._end.stale:
                raise StaleGraph(f"graph of {rows} rows: it was captured over a connection that has gone")
            if rows not in self._end.graphs:
                raise InvalidHop(f"replay of {rows} rows: expected a captured graph: {sorted(self._end.graphs)}")
            self._want_half(rows, deadline_s)
            self._say_step(Announced.GRAPH, rows, sequence, step, deadline_s)
            self._step_begins()
        elif torch.cuda.is_current_stream_capturing():
            self._want_half(rows, deadline_s)
            self._end.graphs.add(rows)
        else:
            what = Announced.EAGER
            if rows in self._end.pieces:
                what = Announced.GRAPH
                self._want_half(rows, deadline_s)
            self._say_step(what, rows, sequence, step, deadline_s)
            self._step_begins()
        self._begun = True
        self._end.under_way = self

    def _check_there(self) -> None:
        if self._sock is None:
            raise PeerLost(f"no connection to the FFN server at {self.where}: {self._why_lost}")

    def _want_half(self, rows: int, deadline_s: float) -> None:
        if rows not in self._halves:
            self._say_step(Announced.CAPTURE, rows, 0, 0, deadline_s)
            self._halves.add(rows)

    def _say_step(self, what: Announced, rows: int, sequence: int, step: int, deadline_s: float) -> None:
        sock, layout = self._sock, self._layout
        assert sock is not None
        tail = (sequence, step, self._first, 0, rows, layout.hidden, int(what), rows * layout.row_bytes)
        HEADER.pack_into(self._out, 0, MAGIC, PROTOCOL_VERSION, _HOP, self._code, *tail)
        left = memoryview(self._out)
        while left:
            try:
                left = left[sock.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                try:
                    self._wait(sock, select.POLLOUT, deadline_s)
                except TimeoutError:
                    self._end_with("the FFN server's host takes no announcement", HopTimeout)
            except OSError as error:
                self._end_with(f"the FFN server has gone ({error})")

    def _listen_in(self) -> None:
        """Take what the FFN's host has said.

        Raises:
            PeerLost: it leaves, or has gone.
        """
        told = self._words()
        if told is None and self._leaves:
            told = "the FFN server said goodbye"
        if told is not None:
            self._end_with(told)

    def _words(self) -> str | None:
        """What the FFN's host has said that ends the connection; None for nothing, signs of life or a goodbye."""
        reset: OSError | None = None
        while True:
            try:
                self._take_quiet(self._read())
            except BlockingIOError:
                return None if reset is None else f"the FFN server has gone: {reset}"
            except ConnectionResetError as error:  # it closed before it had read all; what it said is behind this
                if reset is not None:
                    return f"the FFN server has gone: {error}"
                reset = error
            except (OSError, EOFError, ProtocolError) as error:
                return f"the FFN server has gone or failed: {error}"

    def _take_quiet(self, length: int) -> None:
        """As for every connector; but a goodbye, which may come while a step is on the GPU, is for the next step."""
        if length >= HEADER_BYTES and Header.unpack(memoryview(self._in)[:length]).kind == Kind.BYE:
            self._leaves = True
        elif length >= HEADER_BYTES and Header.unpack(memoryview(self._in)[:length]).kind == Kind.ERROR:
            self._failed = self._told(length)
            raise EOFError(self._failed)
        else:
            super()._take_quiet(length)

    def _told(self, length: int) -> str:
        """The text of the error in ``_in``."""
        header = Header.unpack(memoryview(self._in)[:length])
        text = self._error_text(header, length, time.monotonic_ns() + _TEXT_NS)
        return f"layer {header.layer} can't be computed: {text}"

    def failure(self) -> ConnectorError | None:
        """Why the steps that were waited for are worthless, None if they went well: a look at host memory.

        `FfnError` for what the FFN's host couldn't compute, and `StepLost` for the rest, which may be repeated.
        """
        with self._lock:
            buffers = self._end.buffers
            if self._sock is None or buffers is None:
                return None if self._ended_well else self._verdict(self._why_lost)
            status = buffers.status()
            if status.code is HopCode.OK:
                return None
            told = self._words() or "no word from the FFN server"
            late = f" within {self._end.hop_timeout_s:g} s" if status.code is HopCode.DEADLINE else ""
            return self._verdict(f"{told}; on the GPU: {status}{late}")

    def _verdict(self, why: str) -> ConnectorError:
        return FfnError(why) if self._failed is not None else StepLost(why)

    # The end

    def _end_with(self, why: str, kind: type[PeerLost] = PeerLost) -> NoReturn:
        """End the connection before a step's announcement: every step that was announced is on the GPU.

        They are waited for, each wait of theirs up to its deadline unless the peer has gone; a server that said goodbye
        answers them first. So they count, unless one of them failed.
        """
        buffers = self._end.buffers
        assert buffers is not None
        if not self._leaves:
            buffers.abort()
        torch.cuda.synchronize(buffers.device)
        self._ended_well = buffers.status().code is HopCode.OK
        self._drop(why)
        raise kind(f"{self.where}: {why}; look at that server's log, restart it if it has ended")

    def _drop(self, why: str) -> None:
        """No wait goes on on the GPU afterwards, and captured graphs run through without doing anything."""
        hang_up, buffers = self._hang_up, self._end.buffers
        if hang_up is not None and buffers is not None:
            self._hang_up = None
            buffers.abort()
            hang_up.silence()  # once disconnected, they may be another connection's
            buffers.disconnect()  # waits for the device
            hang_up.stop()
        super()._drop(why)


class IpcAttentionConnector(GpuAttentionConnector, ShmAttentionConnector):
    """Hops between GPUs of one host.

    Args:
        address: of the FFN server, from ``address_of``.
        end: this rank's buffers; one connection at a time uses them.
        secret: shared with the FFN server, or None.
    """

    def __init__(self, address: str, end: GpuEnd, *, secret: bytes | None = None) -> None:
        super().__init__(address, secret=secret, spin_us=0)
        self._end = end
        self._page: HandlePage | None = None

    def _greet(self, sock: socket.socket, greeting: Greeting, sealed: bytes, deadline_s: float) -> None:
        buffers = self._end.make(greeting)
        self._page, fd = HandlePage.create()
        try:
            self._page.put("attention", buffers.handle())
            send_greeting(sock, sealed, fd)
        finally:
            os.close(fd)
        self._read = functools.partial(sock.recv_into, self._in)

    def _meet(self, sock: socket.socket, deadline_s: float) -> None:
        buffers = self._end.buffers
        assert self._page is not None
        try:
            buffers.open(self._page.get("ffn"))
            buffers.reset()
        except (HopError, LayoutError) as error:
            buffers.disconnect()
            self._drop(str(error))
            raise ConnectionRefused(f"the FFN server at {self.where}: {error}") from error
        self._hang_up = HangUp(sock, buffers.abort)

    def _release(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page.close()
