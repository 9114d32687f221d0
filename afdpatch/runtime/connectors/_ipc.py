"""What both sides of connectors between GPUs share: how a step is announced, the page of handles, the watch on a peer.

Greeting and messages of `ipc` are those of `shm`, and in the place of the payload's memfd goes one with the two handles
of the GPU buffers; `nccl` has those of `tcp`. The header of a HOP announces a whole step: the first layer, and in the
place of the payload's offset how the step is launched. Payloads and flags go from GPU to GPU.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

from afdpatch.kernels.layout import Geometry
from afdpatch.runtime.protocol import Greeting, ProtocolError

_PAGE = 4096
_HALF = 2048
_LOOK_MS = 100
_LENGTH = struct.Struct("<I")
log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Announced(enum.IntEnum):
    """What the attention host announces, in the ``offset`` of a HOP's header."""

    EAGER = 0
    """A step, launched hop by hop: each layer of the greeting once, in order, with this many rows."""
    GRAPH = 1
    """The same; its other half is to be replayed from the graph that was captured with this many rows."""
    CAPTURE = 2
    """A step with this many rows is being captured, whole or in pieces: capture its other half. No hop takes place."""

    @classmethod
    def of(cls, offset: int) -> Announced:
        """Read it from a header.

        Raises:
            ProtocolError: none of them.
        """
        try:
            return cls(offset)
        except ValueError:
            raise ProtocolError("announced", offset, ", ".join(f"{e.value} ({e.name})" for e in cls)) from None


def geometry_of(greeting: Greeting) -> Geometry:
    """The slots that an attention side's greeting asks for, on either GPU."""
    wire = "float8_e4m3fn" if greeting.a2f_dtype == "fp8_e4m3" else ""
    return Geometry(greeting.max_rows, greeting.hidden_size, greeting.dtype, greeting.micro_batches, wire=wire)


class HandlePage:
    """A sealed memfd of one page: the attention side's handle in its first half, the FFN side's in its second."""

    def __init__(self, fd: int) -> None:
        """Map ``fd``, which stays the caller's."""
        self._map = mmap.mmap(fd, _PAGE)

    @classmethod
    def create(cls) -> tuple[HandlePage, int]:
        """A new one and its descriptor, which the caller closes once it is sent."""
        fd = os.memfd_create("afdpatch-handles", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _PAGE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a peer that could shrink it would kill this process with SIGBUS
        return cls(fd), fd

    @classmethod
    def attach(cls, fd: int) -> HandlePage:
        """Map one that came from a peer.

        Raises:
            ProtocolError: not a memfd, not sealed, or of another size.
        """
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError as error:
            raise ProtocolError("memfd", os.strerror(error.errno or 0), "a sealed memfd") from error
        if seals & _SEALS != _SEALS or size != _PAGE:
            raise ProtocolError("memfd", f"{size} bytes, seals {seals}", f"{_PAGE} bytes, seals {_SEALS}")
        return cls(fd)

    def put(self, role: str, handle: bytes) -> None:
        """Leave the handle of a role ("attention" or "ffn")."""
        at = 0 if role == "attention" else _HALF
        self._map[at : at + 4 + len(handle)] = _LENGTH.pack(len(handle)) + handle

    def get(self, role: str) -> bytes:
        """The handle of a role; empty if there is none."""
        at = 0 if role == "attention" else _HALF
        (length,) = _LENGTH.unpack_from(self._map, at)
        return self._map[at + 4 : at + 4 + min(length, _HALF - 4)]

    def close(self) -> None:
        """Unmap."""
        self._map.close()


class HangUp:
    """A thread that calls ``on_gone`` as soon as the other end of a socket has gone, whoever waits for what meanwhile.

    A host may be held up in a launch while its GPU waits for a peer that died; this thread isn't.

    Args:
        look: called meanwhile, every tenth of a second; None for nothing.
    """

    def __init__(
        self, sock: socket.socket, on_gone: Callable[[], None], look: Callable[[], None] | None = None
    ) -> None:
        self._sock = sock
        self._on_gone = on_gone
        self._look = look
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="afd-ipc-hang-up", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        try:
            while not poll.poll(None if self._look is None else _LOOK_MS) and not self._stopped:
                if self._look is not None:
                    self._look()
        except Exception:  # who isn't watched any more must not be waited for
            log.exception("the watch over a connection failed: it is ended")
        if not self._stopped:
            self._on_gone()

    def silence(self) -> None:
        """From now on ``on_gone`` isn't called any more; `stop` has to follow."""
        self._stopped = True

    def stop(self) -> None:
        """End the thread and both directions of the socket, which is still open; ``on_gone`` isn't called any more."""
        self._stopped = True
        self.end_connection()
        self._thread.join()

    def end_connection(self) -> None:
        """End both directions of the socket, which both sides then notice as if the other had gone."""
        with contextlib.suppress(OSError):  # the peer's end closed it
            self._sock.shutdown(socket.SHUT_RDWR)
