"""The attention side of the `shm` connector."""

from __future__ import annotations

import functools
import os
import select
import socket

from torch import Tensor

from afdpatch.runtime.connectors._attention import SocketAttentionConnector
from afdpatch.runtime.connectors._memory import (
    HopMemory,
    close_all,
    peer_user,
    readable,
    receive_message,
    send_greeting,
)
from afdpatch.runtime.connectors.base import ConnectionRefused
from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    Kind,
    Layout,
    error_text,
)

_HOP, _REPLY = int(Kind.HOP), int(Kind.REPLY)


class ShmAttentionConnector(SocketAttentionConnector):
    """Hops through a sealed memfd that this side makes, announced by headers on a unix SOCK_SEQPACKET socket.

    Args:
        address: of the FFN server, from ``address_of``.
        secret: shared with the FFN server, or None.
        spin_us: how long to look for the answer before sleeping, in microseconds.
    """

    def __init__(self, address: str, *, secret: bytes | None = None, spin_us: int = 50) -> None:
        super().__init__(readable(address), secret=secret, spin_us=spin_us)
        self._address = address
        self._memory: HopMemory | None = None

    def _open(self, deadline_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect(self._address)
            pid, uid = peer_user(sock)
            if uid != os.getuid():
                raise ConnectionRefused(
                    f"process {pid} at {self.where} runs as user {uid}, expected {os.getuid()}; "
                    f"run both servers as one user, or choose another port"
                )
        except BaseException:
            sock.close()
            raise
        return sock

    def _say(self, sock: socket.socket, text: bytes, deadline_s: float) -> None:
        sock.send(text, socket.MSG_NOSIGNAL)

    def _hear(self, sock: socket.socket, deadline_s: float) -> bytes:
        self._wait(sock, select.POLLIN, deadline_s)
        text, fds = receive_message(sock)
        close_all(fds)
        return text

    def _greet(self, sock: socket.socket, greeting: Greeting, sealed: bytes, deadline_s: float) -> None:
        self._memory, fd = HopMemory.create(Layout.of(greeting))
        try:
            send_greeting(sock, sealed, fd)
        finally:
            os.close(fd)
        self._read = functools.partial(sock.recv_into, self._in)

    def _exchange(
        self, hidden: Tensor, out: Tensor, layer: int, micro_batch: int, sequence: int, step: int, deadline_ns: int
    ) -> None:
        # From here on nothing of this object that close(), in a signal handler, takes away.
        memory, sock = self._memory, self._sock
        views = memory.views if memory is not None else ()
        if sock is None or not views:
            raise EOFError("closed")
        a2f, f2a = views[micro_batch]
        rows = len(hidden)
        a2f[:rows].copy_(hidden)
        layout = self._layout
        width, nbytes = layout.hidden, rows * layout.row_bytes
        head = (MAGIC, PROTOCOL_VERSION)
        tail = (self._code, sequence, step, layer, micro_batch, rows, width)
        HEADER.pack_into(self._out, 0, *head, _HOP, *tail, layout.a2f_offset(micro_batch), nbytes)
        HEADER.pack_into(self._expected, 0, *head, _REPLY, *tail, layout.f2a_offset(micro_batch), nbytes)
        sock.send(self._out, socket.MSG_NOSIGNAL)
        length = self._message(deadline_ns, self._spin_ns)
        if length != HEADER_BYTES or not self._in.startswith(self._expected):
            self._unexpected(length, layer, sequence, deadline_ns)
        out.copy_(f2a[:rows])

    def _error_text(self, header: Header, length: int, deadline_ns: int) -> str:
        return error_text(memoryview(self._in)[:length])

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
