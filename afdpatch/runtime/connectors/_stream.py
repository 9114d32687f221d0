"""Messages over a TCP stream: text with its length before it, what waits to be sent, and the memory of tensors."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from afdpatch.runtime.protocol import ProtocolError
from afdpatch.runtime.secret import MAX_TEXT_BYTES

_TEXT = struct.Struct("<4sI")
_MAGIC = b"AFDt"
_KEEPALIVE_S, _KEEPALIVES = 5, 4
_LONGEST_MS = (1 << 31) - 1  # of a socket's option


def readable(host: str, port: int) -> str:
    """An address as it is written in messages."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def configure(sock: socket.socket, timeout_s: float) -> None:
    """No delay, no waiting; the kernel ends the connection when nothing is acknowledged for so long."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(timeout_s * 1000), _LONGEST_MS))


def text_message(text: bytes) -> bytes:
    """A message of text: magic, length, text."""
    return _TEXT.pack(_MAGIC, len(text)) + text


class TextReader:
    """Reads messages of text, and never a byte beyond one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._length = 0

    def read(self) -> bytes | None:
        """The next message; b"" when the peer closed, None while it hasn't all arrived.

        Raises:
            ProtocolError: not a message of text, or one that is too long, which isn't read. OSError.
        """
        buffer = self._buffer
        while True:
            wanted = _TEXT.size + self._length
            if self._length and len(buffer) == wanted:
                text = bytes(buffer[_TEXT.size :])
                buffer.clear()
                self._length = 0
                return text
            try:
                chunk = self._sock.recv(wanted - len(buffer))
            except BlockingIOError:
                return None
            if not chunk:
                return b""
            buffer += chunk
            if not self._length and len(buffer) == _TEXT.size:
                magic, length = _TEXT.unpack(buffer)
                if magic != _MAGIC:
                    raise ProtocolError("greeting", bytes(buffer), f"{_MAGIC!r} and a length")
                if not 1 <= length <= MAX_TEXT_BYTES:
                    raise ProtocolError("greeting length", length, f"1 to {MAX_TEXT_BYTES} bytes")
                self._length = length


class Outbox:
    """What goes out over a socket that doesn't wait; what can't go at once is copied and waits here.

    Args:
        sock: one that doesn't block.
        limit: most bytes that may wait.
    """

    def __init__(self, sock: socket.socket, limit: int = MAX_TEXT_BYTES + _TEXT.size) -> None:
        self._sock = sock
        self.limit = limit
        self._waiting = bytearray()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send the parts one behind the other. Raises OSError: gone, or more waits than may."""
        sent = 0
        if not self._waiting:
            try:
                sent = self._sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
        for part in parts:
            if sent < len(part):
                self._waiting += part[sent:]
            sent = max(0, sent - len(part))
        if len(self._waiting) > self.limit:
            raise OSError(errno.ENOBUFS, f"{len(self._waiting)} bytes wait for a peer that reads nothing")

    def flush(self) -> None:
        """Send what waits, as far as it goes. Raises OSError."""
        try:
            while self._waiting:
                del self._waiting[: self._sock.send(self._waiting, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def check_connected(sock: socket.socket) -> None:
    """After a connection that took its time. Raises the OSError that it ended with."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    # A port of the kernel's own choice can meet itself where nobody listens.
    if not error and sock.getsockname() == sock.getpeername():
        error = errno.ECONNREFUSED
    if error:
        raise OSError(error, os.strerror(error))
