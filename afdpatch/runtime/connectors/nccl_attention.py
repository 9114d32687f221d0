"""The attention side of the `nccl` connector."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from afdpatch.kernels import HopCode, HopError
from afdpatch.kernels.nccl import NcclBuffers
from afdpatch.kernels.nccl_library import NcclError
from afdpatch.runtime.connectors._ipc import HangUp
from afdpatch.runtime.connectors.base import ConnectionRefused, Unreachable
from afdpatch.runtime.connectors.ipc_attention import GpuAttentionConnector, GpuEnd
from afdpatch.runtime.connectors.tcp_attention import TcpAttentionConnector
from afdpatch.runtime.protocol import Greeting

JOIN_S = 20.0
"""How long both sides have to join the communicator once they have greeted: a first one takes a second or two."""


class NcclAttentionConnector(GpuAttentionConnector, TcpAttentionConnector):
    """Hops between GPUs of any hosts: hosts meet and speak over TCP, hidden states go through NCCL.

    Each connection has a communicator of its own, whose name travels in this side's greeting. Graphs that were captured
    over one end with it.

    Args:
        host: name or address of the FFN server.
        port: its port.
        end: this rank's buffers, of the kind `NcclBuffers`; one connection at a time uses them.
        secret: shared with the FFN server, or None.
        peer_timeout_s: the kernel ends the connection when nothing is acknowledged for so long.
    """

    def __init__(
        self, host: str, port: int, end: GpuEnd, *, secret: bytes | None = None, peer_timeout_s: float = 30.0
    ) -> None:
        super().__init__(host, port, secret=secret, spin_us=0, peer_timeout_s=peer_timeout_s)
        self._end = end
        self._name = b""

    def _shake_hands(self, sock: socket.socket, greeting: Greeting, deadline_s: float) -> Greeting:
        buffers: NcclBuffers = self._end.make(greeting)
        try:
            self._name = buffers.handle()
        except NcclError as error:
            raise ConnectionRefused(f"this host can't begin a communicator: {error}") from error
        return super()._shake_hands(sock, replace(greeting, communicator=self._name.hex()), deadline_s)

    def _meet(self, sock: socket.socket, deadline_s: float) -> None:
        end = self._end
        buffers: NcclBuffers = end.buffers
        if end.graphs:
            end.stale = True
            end.graphs.clear()
        try:
            buffers.open(self._name)
            self._hang_up = HangUp(sock, buffers.abort, buffers.look)
            buffers.join(max(deadline_s, time.monotonic() + JOIN_S), self._check_open)
        except BaseException as error:
            self._drop(str(error))
            buffers.disconnect()
            if isinstance(error, NcclError | HopError):
                raise Unreachable(f"the FFN server at {self.where}: {error}") from error
            raise

    def graphs_stand(self) -> bool:
        with self._lock:
            if self._sock is not None and self._end.buffers.status().code is HopCode.OK:
                told = self._words()
                if told is None and not self._leaves:
                    return True
            return not self._end.graphs

    def _step_begins(self) -> None:
        self._end.buffers.begun()

    def _step_is_launched(self) -> None:
        self._end.buffers.launched()
