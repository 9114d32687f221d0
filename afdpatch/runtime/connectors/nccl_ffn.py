"""The FFN side of the `nccl` connector."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from afdpatch.kernels import HopError
from afdpatch.kernels.nccl import NcclBuffers
from afdpatch.kernels.nccl_library import NcclError
from afdpatch.runtime.connectors._ipc import HangUp
from afdpatch.runtime.connectors._peer import Peer
from afdpatch.runtime.connectors._stream import Outbox
from afdpatch.runtime.connectors.base import IncomingHop
from afdpatch.runtime.connectors.ipc_ffn import Compute, GpuFfnConnector, GpuPeer
from afdpatch.runtime.connectors.nccl_attention import JOIN_S
from afdpatch.runtime.connectors.tcp_ffn import TcpFfnConnector, TcpPending
from afdpatch.runtime.protocol import HEADER_BYTES, Greeting, Header, ProtocolError
from afdpatch.runtime.secret import Handshake
from afdpatch.runtime.status import StatusPage

_LAST_OF_JOINING_S = 2.0
"""Between the end of the peer's joining, after which it may announce a step, and of this side's."""
log = logging.getLogger(__name__)


class NcclFfnConnector(GpuFfnConnector, TcpFfnConnector):
    """Attention ranks on GPUs of any hosts; see ``NcclAttentionConnector`` for the other side.

    Args:
        host: name or address to listen at.
        port: 0 lets the kernel choose one, which ``port`` then tells.
        compute, freeze, hop_timeout_s: as `IpcFfnConnector` has them; the deadline is a step's.
        secret, page, peer_timeout_s: see ``SocketFfnConnector``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        compute: Compute,
        *,
        freeze: Callable[[bool], None] | None = None,
        merge: bool = True,
        hop_timeout_s: float = 60.0,
        secret: bytes | None = None,
        page: StatusPage | None = None,
        peer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(host, port, secret=secret, page=page, peer_timeout_s=peer_timeout_s)
        self._compute = compute
        self._freeze = freeze or (lambda frozen: None)
        self._merge = merge
        self.hop_timeout_s = hop_timeout_s
        self._todo: deque[list[IncomingHop]] = deque()

    def _stranger(self, sock: socket.socket, who: str, handshake: Handshake, deadline_s: float) -> TcpPending:
        return _NcclPending(sock, who, handshake, deadline_s, self.hop_timeout_s)


class _NcclPending(TcpPending):
    """A connection from anywhere; the communicator's name comes in its greeting."""

    def __init__(
        self, sock: socket.socket, who: str, handshake: Handshake, deadline_s: float, hop_timeout_s: float
    ) -> None:
        super().__init__(sock, who, handshake, deadline_s)
        self._hop_timeout_s = hop_timeout_s

    def become_peer(self, number: int, greeting: Greeting) -> Peer:
        if not greeting.communicator:
            raise ProtocolError(
                "communicator", "none", "one, as this FFN server's connector is nccl; give both the same"
            )
        try:
            buffers = NcclBuffers.create(
                greeting.max_rows,
                greeting.hidden_size,
                greeting.dtype,
                greeting.micro_batches,
                torch.device("cuda", torch.cuda.current_device()),
                initiator=False,
                deadline_s=self._hop_timeout_s,
            )
        except torch.OutOfMemoryError as error:
            raise ProtocolError("max_rows", greeting.max_rows, "as many as this GPU has memory for") from error
        buffers.open(bytes.fromhex(greeting.communicator))
        return _NcclPeer(self, number, greeting, buffers, self.outbox)


class _NcclPeer(GpuPeer):
    """It joins the communicator in a thread of its own, so that the loop serves the others meanwhile."""

    buffers: NcclBuffers

    def __init__(
        self, pending: TcpPending, number: int, greeting: Greeting, buffers: NcclBuffers, outbox: Outbox
    ) -> None:
        super().__init__(pending, number, greeting, buffers)
        self._outbox = outbox
        self._got = 0
        self._joining = threading.Thread(target=self._join, name="afd-nccl-join", daemon=True)
        self._joining.start()

    def _join(self) -> None:
        try:
            self.buffers.join(time.monotonic() + JOIN_S)
        except Exception as error:  # whatever it is, the peer must not wait for a communicator that never comes
            known = isinstance(error, (NcclError, HopError))
            log.error("attention rank %d (%s): %s", self.rank, self.who, error, exc_info=not known)
            self.hang_up.end_connection()

    def watch(self) -> HangUp:
        return HangUp(self.sock, self.buffers.abort, self.buffers.look)

    def step_begins(self) -> None:
        self.buffers.begun()

    def step_is_launched(self) -> None:
        self.buffers.launched()

    @property
    def interest(self) -> int:
        return select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN

    def message(self) -> Header | None:
        head = memoryview(self._in)[:HEADER_BYTES]
        try:
            while self._got < HEADER_BYTES:
                count = self.sock.recv_into(head[self._got :])
                if not count:
                    raise EOFError("end of the stream")
                self._got += count
        except BlockingIOError:
            return None
        self._got = 0
        return Header.unpack(head)

    def read(self) -> Header | None:
        header = super().read()
        if header is not None and self._joining.is_alive() and header.rows:
            self._joining.join(_LAST_OF_JOINING_S)
            if self._joining.is_alive():
                raise ProtocolError("step", "one before the communicator was joined", "steps after it")
        return header

    def send(self, message: bytes | bytearray) -> None:
        self._outbox.send(message)

    def flush(self) -> None:
        self._outbox.flush()

    def close(self) -> None:
        self.buffers.abort()
        self._joining.join(_LAST_OF_JOINING_S)
        super().close()
