"""Shared memory and sockets of the `shm` connector: the memfd with its views, the address, the peer's user."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import socket
import struct

import torch
from torch import Tensor

from afdpatch.runtime.protocol import ITEM_BYTES, Layout, ProtocolError
from afdpatch.runtime.secret import MAX_TEXT_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")
_INT = struct.Struct("i")
_MAX_FDS = 8


def address_of(host: str, port: int, ffn_rank: int) -> str:
    """The name of an FFN rank's socket in the abstract namespace; nothing appears in the file system.

    The name lives in the network namespace: two containers meet only if they share one.
    """
    name = f"{host}:{port}"
    if len(name.encode()) > 64:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"\0afdpatch/{name}/ffn{ffn_rank}"


def readable(address: str) -> str:
    """An address as it is written in messages (and in /proc/net/unix)."""
    return "@" + address[1:]


def peer_user(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def send_greeting(sock: socket.socket, message: bytes, fd: int) -> None:
    """Send the greeting with the memfd in one message."""
    socket.send_fds(sock, [message], [fd])


def receive_message(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message of at most 64 KiB and the descriptors that came with it, which the caller owns; b"": the peer left.

    Raises:
        ProtocolError: longer than 64 KiB, or with more descriptors than anybody needs; nothing is left open.
        BlockingIOError: nothing there yet.
    """
    space = socket.CMSG_SPACE(_MAX_FDS * _INT.size)
    data, ancillary, flags, _ = sock.recvmsg(MAX_TEXT_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(fd for (fd,) in _INT.iter_unpack(raw[: len(raw) - len(raw) % _INT.size]))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise ProtocolError("greeting length", "a longer message", f"at most {MAX_TEXT_BYTES} bytes")
    return data, fds


def close_all(fds: list[int]) -> None:
    """Close descriptors that arrived."""
    for fd in fds:
        os.close(fd)


class HopMemory:
    """The memfd of one connection, mapped.

    Attributes:
        views: for each micro-batch two tensors [max_rows, hidden], attention to FFN and back; none once closed.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        """Map ``fd``, which stays the caller's."""
        self.layout = layout
        self._map: mmap.mmap | None = mmap.mmap(fd, layout.total_bytes)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        # Views made in inference mode could not be written to outside of it, and the caller's mode is none of ours.
        with torch.inference_mode(False):
            self.views: tuple[tuple[Tensor, Tensor], ...] = tuple(
                (self._view(dtype, layout.a2f_offset(index)), self._view(dtype, layout.f2a_offset(index)))
                for index in range(layout.micro_batches)
            )

    def _view(self, dtype: torch.dtype, offset: int) -> Tensor:
        layout = self.layout
        count = layout.max_rows * layout.row_bytes // ITEM_BYTES[layout.dtype]
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(layout.max_rows, layout.hidden)

    @classmethod
    def create(cls, layout: Layout) -> tuple[HopMemory, int]:
        """A new sealed memfd, mapped, and its descriptor, which the caller closes once it is sent."""
        fd = os.memfd_create("afdpatch-hop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes)
            # A peer that could shrink it would kill the other side with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, layout), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: Layout) -> HopMemory:
        """Map a memfd that came from a peer.

        Raises:
            ProtocolError: not a memfd, not sealed, or not of the size that the greeting implies.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if seals & _SEALS != _SEALS:
                raise ProtocolError("memfd seals", seals, f"at least {_SEALS} (shrink, grow, seal)")
            if size != layout.total_bytes:
                raise ProtocolError("memfd size", size, f"{layout.total_bytes} bytes")
            return cls(fd, layout)
        except OSError as error:
            raise ProtocolError("memfd", os.strerror(error.errno or 0), "a sealed memfd that can be mapped") from error

    def close(self) -> None:
        """Let go of the mapping, which goes with its last view: closing it under a tensor would end in SIGSEGV."""
        self.views = ()
        self._map = None
