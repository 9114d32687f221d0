"""The attention side of the `tcp` connector."""

from __future__ import annotations

import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from afdpatch.runtime.connectors._attention import SocketAttentionConnector
from afdpatch.runtime.connectors._stream import (
    TextReader,
    bytes_of,
    check_connected,
    configure,
    readable,
    text_message,
)
from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_ERROR_BYTES,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    Kind,
    ProtocolError,
)

_HOP, _REPLY = int(Kind.HOP), int(Kind.REPLY)
_LOOK_S = 0.1
"""How often a wait for a name looks whether this connector was closed."""


class TcpAttentionConnector(SocketAttentionConnector):
    """Hops over one TCP connection, header and payload together.

    Args:
        host: name or address of the FFN server.
        port: its port.
        secret: shared with the FFN server, or None.
        spin_us: how long to look for the answer before sleeping, in microseconds.
        peer_timeout_s: the kernel ends the connection when nothing is acknowledged for so long.
    """

    def __init__(
        self, host: str, port: int, *, secret: bytes | None = None, spin_us: int = 50, peer_timeout_s: float = 30.0
    ) -> None:
        super().__init__(readable(host, port), secret=secret, spin_us=spin_us)
        self._host, self._port = host, port
        self._peer_timeout_s = peer_timeout_s
        self._text: TextReader | None = None
        self._got = 0

    def _open(self, deadline_s: float) -> socket.socket:
        error: OSError | None = None
        found = _resolve(self._host, self._port, deadline_s, self._check_open)
        for index, (family, kind, protocol, _, address) in enumerate(found):
            now = time.monotonic()
            limit_s = now + (deadline_s - now) / (len(found) - index)  # one that doesn't answer leaves time for others
            sock = socket.socket(family, kind, protocol)
            try:
                configure(sock, self._peer_timeout_s)
                try:
                    sock.connect(address)
                except BlockingIOError:
                    self._wait(sock, select.POLLOUT, limit_s)
                check_connected(sock)
            except OSError as failed:
                sock.close()
                error = failed
            except BaseException:
                sock.close()
                raise
            else:
                self._text = TextReader(sock)
                return sock
        raise error or OSError(f"{self._host} has no address")

    def _say(self, sock: socket.socket, text: bytes, deadline_s: float) -> None:
        self._send_all(sock, [text_message(text)], deadline_s)

    def _send_all(self, sock: socket.socket, parts: list[bytes | bytearray | memoryview], deadline_s: float) -> None:
        while parts:
            try:
                sent = sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(sock, select.POLLOUT, deadline_s)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _hear(self, sock: socket.socket, deadline_s: float) -> bytes:
        assert self._text is not None
        while True:
            text = self._text.read()
            if text is not None:
                return text
            self._wait(sock, select.POLLIN, deadline_s)

    def _greet(self, sock: socket.socket, greeting: Greeting, sealed: bytes, deadline_s: float) -> None:
        self._say(sock, sealed, deadline_s)
        head = memoryview(self._in)[:HEADER_BYTES]

        def read_header() -> int:
            """64 once a whole header has come; BlockingIOError before."""
            while True:
                count = sock.recv_into(head[self._got :])
                if not count:
                    return 0
                self._got += count
                if self._got == HEADER_BYTES:
                    self._got = 0
                    return HEADER_BYTES

        self._read = read_header

    def _exchange(
        self, hidden: Tensor, out: Tensor, layer: int, micro_batch: int, sequence: int, step: int, deadline_ns: int
    ) -> None:
        sock, layout = self._sock, self._layout
        if sock is None:  # close(), in a signal handler
            raise EOFError("closed")
        rows, width = hidden.shape
        nbytes = rows * layout.row_bytes
        head = (MAGIC, PROTOCOL_VERSION)
        tail = (self._code, sequence, step, layer, micro_batch, rows, width, 0, nbytes)
        HEADER.pack_into(self._out, 0, *head, _HOP, *tail)
        HEADER.pack_into(self._expected, 0, *head, _REPLY, *tail)
        self._send_all(sock, [self._out, bytes_of(hidden.contiguous())], deadline_ns / 1e9)
        length = self._message(deadline_ns, self._spin_ns)
        if not self._in.startswith(self._expected):
            self._unexpected(length, layer, sequence, deadline_ns)
        self._fill(sock, bytes_of(out), deadline_ns)

    def _fill(self, sock: socket.socket, target: memoryview, deadline_ns: int) -> None:
        while target:
            try:
                count = sock.recv_into(target)
            except BlockingIOError:
                self._wait(sock, select.POLLIN, deadline_ns / 1e9)
                continue
            if not count:
                raise EOFError("connection closed")
            target = target[count:]

    def _error_text(self, header: Header, length: int, deadline_ns: int) -> str:
        if header.nbytes > MAX_ERROR_BYTES:
            raise ProtocolError("payload bytes", header.nbytes, f"at most {MAX_ERROR_BYTES} of an ERROR")
        sock, text = self._sock, bytearray(header.nbytes)
        if sock is None:
            raise EOFError("closed")
        self._fill(sock, memoryview(text), deadline_ns)
        return text.decode("utf-8", "replace")


def _resolve(host: str, port: int, deadline_s: float, check_open: Callable[[], None]) -> list[Any]:
    """The addresses of a host, as ``socket.getaddrinfo`` gives them.

    Raises:
        OSError, TimeoutError among them; what ``check_open`` raises, which is asked again and again.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    # The resolver knows no deadline of ours, so it may outlive this call in a thread of its own.
    found: list[Any] = []
    failed: list[OSError] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="afd-resolve", daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        thread.join(min(left_s, _LOOK_S))
        check_open()
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise TimeoutError(f"the name {host} was not resolved in time")
    return found
