"""The FFN side of the `tcp` connector."""

from __future__ import annotations

import select
import socket
import time

import torch
from torch import Tensor

from afdpatch.runtime.connectors._ffn import SocketFfnConnector
from afdpatch.runtime.connectors._peer import QUIET, Peer, Pending
from afdpatch.runtime.connectors._stream import Outbox, TextReader, bytes_of, configure, readable, text_message
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


class TcpPending(Pending):
    """A connection from anywhere."""

    def __init__(self, sock: socket.socket, who: str, handshake: Handshake, deadline_s: float) -> None:
        super().__init__(sock, who, 0, handshake, deadline_s)
        self._text = TextReader(sock)
        self.outbox = Outbox(sock)

    def hear(self) -> bytes | None:
        return self._text.read()

    def say(self, text: bytes) -> None:
        self.outbox.send(text_message(text))

    def become_peer(self, number: int, greeting: Greeting) -> Peer:
        if greeting.communicator:
            raise ProtocolError(
                "communicator", "one", "none, as this FFN server's connector is tcp; give both the same"
            )
        return _TcpPeer(self, number, greeting)


class _TcpPeer(Peer):
    """Payloads follow their headers; what has come of one stays here while the others are served."""

    def __init__(self, pending: TcpPending, number: int, greeting: Greeting) -> None:
        super().__init__(pending, number, greeting, inline=True)
        self._outbox = pending.outbox
        self._layout = layout = Layout.of(greeting)
        self._outbox.limit = layout.micro_batches * (layout.max_rows * layout.row_bytes + HEADER_BYTES) + (1 << 16)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._buffers: dict[int, Tensor] = {}
        self._in = memoryview(bytearray(HEADER_BYTES))
        self._out = bytearray(HEADER_BYTES)
        self._got = 0
        self._coming: Header | None = None
        self._target = memoryview(b"")

    @property
    def interest(self) -> int:
        return select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN

    def read(self) -> Header | None:
        try:
            while True:
                header = self._coming
                target = self._in[self._got :] if header is None else self._target
                count = self.sock.recv_into(target)
                if not count:
                    raise EOFError("end of the stream")
                self.heard_ns = time.monotonic_ns()
                if header is None:
                    self._got += count
                    if self._got < HEADER_BYTES:
                        continue
                    self._got = 0
                    header = Header.unpack(self._in)
                    if header.kind in QUIET:
                        return header
                    self.admit(header)
                    self._coming = header
                    self._target = bytes_of(self._rows(header))
                    continue
                self._target = target[count:]
                if not self._target:
                    self._coming = None
                    return header
        except BlockingIOError:
            return None

    def _rows(self, header: Header) -> Tensor:
        """The buffer of a micro-batch, which grows with the rows that come, up to the greeting's ``max_rows``."""
        buffer = self._buffers.get(header.micro_batch)
        if buffer is None or buffer.shape[0] < header.rows:
            rows = min(1 << (header.rows - 1).bit_length(), self._layout.max_rows)
            # A buffer made in inference mode could not be written to outside of it.
            try:
                with torch.inference_mode(False):
                    buffer = torch.empty(rows, self._layout.hidden, dtype=self._dtype)
            except RuntimeError as error:
                raise ProtocolError("rows", header.rows, "as many as this host has memory for") from error
            self._buffers[header.micro_batch] = buffer
        return buffer[: header.rows]

    def hidden(self, header: Header) -> Tensor:
        return self._buffers[header.micro_batch][: header.rows]

    def answer(self, header: Header, result: Tensor) -> None:
        _, dtype, sequence, step, layer, micro_batch, rows, hidden, _, nbytes = header
        HEADER.pack_into(
            self._out, 0, MAGIC, PROTOCOL_VERSION, _REPLY,
            dtype, sequence, step, layer, micro_batch, rows, hidden, 0, nbytes,
        )  # fmt: skip
        self._outbox.send(self._out, bytes_of(result.contiguous()))

    def send(self, message: bytes | bytearray) -> None:
        self._outbox.send(message)

    def flush(self) -> None:
        self._outbox.flush()


class TcpFfnConnector(SocketFfnConnector):
    """Answers hops of any number of attention ranks of any host; see ``TcpAttentionConnector`` for the other side.

    Args:
        host: name or address to listen at.
        port: 0 lets the kernel choose one, which ``port`` then tells.
        secret, spin_us, page, greeting_timeout_s, peer_timeout_s: see ``SocketFfnConnector``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes | None = None,
        spin_us: int = 50,
        page: StatusPage | None = None,
        greeting_timeout_s: float = 5.0,
        peer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            readable(host, port),
            secret=secret,
            spin_us=spin_us,
            page=page,
            greeting_timeout_s=greeting_timeout_s,
            peer_timeout_s=peer_timeout_s,
        )
        self._host = host
        self.port = port

    def _listen(self) -> socket.socket:
        listener: socket.socket | None = None
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setblocking(False)
            # The ends of old connections linger for a minute; a living listener keeps the address all the same.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            if listener is not None:
                listener.close()
            raise AddressInUse(
                f"cannot listen at {self._where}: {error.strerror}; expected a free port at an address of this host: "
                f"stop the other server there, or choose another port, host or ffn_addresses"
            ) from error
        self.port = listener.getsockname()[1]
        self._where = readable(self._host, self.port)
        return listener

    def _receive_stranger(self, sock: socket.socket, handshake: Handshake, deadline_s: float) -> Pending:
        configure(sock, self._peer_timeout_s)
        host, port = sock.getpeername()[:2]
        return self._stranger(sock, f"process at {readable(host, port)}", handshake, deadline_s)

    def _stranger(self, sock: socket.socket, who: str, handshake: Handshake, deadline_s: float) -> TcpPending:
        return TcpPending(sock, who, handshake, deadline_s)
