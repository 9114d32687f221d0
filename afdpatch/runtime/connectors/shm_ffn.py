"""The FFN side of the `shm` connector."""

from __future__ import annotations

import os
import socket

from torch import Tensor

from afdpatch.runtime.connectors._ffn import SocketFfnConnector
from afdpatch.runtime.connectors._memory import HopMemory, close_all, peer_user, readable, receive_message
from afdpatch.runtime.connectors._peer import QUIET, Peer, Pending
from afdpatch.runtime.connectors.base import AddressInUse
from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    Kind,
    Layout,
    ProtocolError,
)
from afdpatch.runtime.secret import Handshake
from afdpatch.runtime.status import StatusPage

_BACKLOG = 64
_REPLY = int(Kind.REPLY)


class ShmPending(Pending):
    """A connection of this host; the memfd comes with its greeting."""

    def __init__(self, sock: socket.socket, who: str, pid: int, handshake: Handshake, deadline_s: float) -> None:
        super().__init__(sock, who, pid, handshake, deadline_s)
        self.fds: list[int] = []

    def hear(self) -> bytes | None:
        self._close_fds()
        try:
            text, self.fds = receive_message(self.sock)
        except BlockingIOError:
            return None
        return text

    def say(self, text: bytes) -> None:
        self.sock.send(text, socket.MSG_NOSIGNAL)

    def become_peer(self, number: int, greeting: Greeting) -> Peer:
        if len(self.fds) != 1:
            raise ProtocolError("descriptors", len(self.fds), "1, the memfd")
        memory = HopMemory.attach(self.fds[0], Layout.of(greeting))
        self._close_fds()
        return _ShmPeer(self, number, greeting, memory)

    def end(self) -> None:
        self._close_fds()
        super().end()

    def _close_fds(self) -> None:
        close_all(self.fds)
        self.fds = []


class _ShmPeer(Peer):
    """Hops lie in the memfd that came from the peer."""

    def __init__(self, pending: Pending, number: int, greeting: Greeting, memory: HopMemory) -> None:
        super().__init__(pending, number, greeting, inline=False)
        self._memory = memory
        # One byte more than any message may have, so that a longer one shows.
        self._in = bytearray(HEADER_BYTES + 1)
        self._out = bytearray(HEADER_BYTES)

    def read(self) -> Header | None:
        try:
            length = self.sock.recv_into(self._in)
        except BlockingIOError:
            return None
        if not length:
            raise EOFError("end of the stream")
        if length != HEADER_BYTES:
            raise ProtocolError("message length", length, f"{HEADER_BYTES} bytes")
        header = Header.unpack(self._in)
        if header.kind not in QUIET:
            self.admit(header)
        return header

    def hidden(self, header: Header) -> Tensor:
        return self._memory.views[header.micro_batch][0][: header.rows]

    def answer(self, header: Header, result: Tensor) -> None:
        memory = self._memory
        _, dtype, sequence, step, layer, micro_batch, rows, hidden, _, nbytes = header
        memory.views[micro_batch][1][:rows].copy_(result)
        offset = memory.layout.f2a_offset(micro_batch)
        HEADER.pack_into(
            self._out, 0, MAGIC, PROTOCOL_VERSION, _REPLY,
            dtype, sequence, step, layer, micro_batch, rows, hidden, offset, nbytes,
        )  # fmt: skip
        self.sock.send(self._out, socket.MSG_NOSIGNAL)

    def send(self, message: bytes | bytearray) -> None:
        self.sock.send(message, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        super().close()
        self._memory.close()


class ShmFfnConnector(SocketFfnConnector):
    """Answers hops of any number of attention ranks of this host; see ``ShmAttentionConnector`` for the other side.

    Args:
        address: of this FFN server, from ``address_of``.
        secret, spin_us, page, greeting_timeout_s, peer_timeout_s: see ``SocketFfnConnector``.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        spin_us: int = 50,
        page: StatusPage | None = None,
        greeting_timeout_s: float = 5.0,
        peer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            readable(address),
            secret=secret,
            spin_us=spin_us,
            page=page,
            greeting_timeout_s=greeting_timeout_s,
            peer_timeout_s=peer_timeout_s,
        )
        self._address = address

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(self._address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise AddressInUse(
                f"cannot listen at {self._where}: {error.strerror}; expected a free address: stop the "
                f"other FFN server of this host with the same host, port and rank, or choose another port"
            ) from error
        return listener

    def _receive_stranger(self, sock: socket.socket, handshake: Handshake, deadline_s: float) -> Pending:
        pid, uid = peer_user(sock)
        pending = self._stranger(sock, f"process {pid}", pid, handshake, deadline_s)
        if uid != os.getuid():
            pending.objection = (
                f"process {pid} runs as user {uid}, expected {os.getuid()}; run both servers as one user"
            )
        return pending

    def _stranger(self, sock: socket.socket, who: str, pid: int, handshake: Handshake, deadline_s: float) -> ShmPending:
        return ShmPending(sock, who, pid, handshake, deadline_s)
