"""What both sides of the `ipc` connector share: the hosts' messages, one a step, and the watch over the peer's process.

The hosts speak over a unix SOCK_SEQPACKET socket: greeting, answer, the two handles of the GPU buffers, and then one
announcement a step. Payloads and flags go from GPU to GPU and are none of their business.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from afdpatch.runtime.protocol import ProtocolError

_MAGIC = b"AFDs"
_VERSION = 1
_WORDS = struct.Struct("<4sBBxxIQ12x")
ANNOUNCEMENT_BYTES = _WORDS.size
"""Differs from the 64 bytes of a hop header, so that a message's length says which it is."""
HANDLE_LIMIT = 4096


class Announced(enum.IntEnum):
    """What the attention host announces."""

    EAGER = 1
    """A step, launched hop by hop: each layer of the greeting once, in order, with this many rows."""
    GRAPH = 2
    """The same, replayed from a graph that was captured with this many rows."""
    CAPTURE = 3
    """A graph with this many rows was captured: capture its other half. No hop takes place."""


class Announcement(NamedTuple):
    """One message of the attention host. ``step`` numbers the steps of a connection; it only serves the reader."""

    kind: Announced
    rows: int
    step: int

    def pack(self) -> bytes:
        """``ANNOUNCEMENT_BYTES`` bytes."""
        return _WORDS.pack(_MAGIC, _VERSION, self.kind, self.rows, self.step)

    @classmethod
    def unpack(cls, message: bytes, max_rows: int) -> Announcement:
        """Read a message.

        Raises:
            ProtocolError: of another length, magic, version or kind, or with rows outside of 1..max_rows.
        """
        if len(message) != ANNOUNCEMENT_BYTES:
            raise ProtocolError("announcement length", len(message), f"{ANNOUNCEMENT_BYTES} bytes")
        magic, version, kind, rows, step = _WORDS.unpack(message)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError("announcement", (magic, version), f"{_MAGIC!r}, version {_VERSION}")
        if kind not in {each.value for each in Announced}:
            raise ProtocolError("announced", kind, ", ".join(f"{each.value} ({each.name})" for each in Announced))
        if not 1 <= rows <= max_rows:
            raise ProtocolError("rows", rows, f"1..{max_rows}")
        return cls(Announced(kind), rows, step)


class HangUp:
    """A thread that calls ``on_gone`` as soon as the other end of a socket has gone, whoever waits for what meanwhile.

    A host may be held up in a launch while its GPU waits for a peer that died; this thread isn't.
    """

    def __init__(self, sock: socket.socket, on_gone: Callable[[], None]) -> None:
        self._sock = sock
        self._on_gone = on_gone
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="afd-ipc-hang-up", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        poll.poll()
        if not self._stopped:
            self._on_gone()

    def stop(self) -> None:
        """End the thread and both directions of the socket; ``on_gone`` isn't called any more."""
        self._stopped = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer's end closed it
        self._thread.join()
