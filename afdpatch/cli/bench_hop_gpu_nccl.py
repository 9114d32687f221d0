"""NCCL's send and receive without torch.distributed around them, for `afdpatch bench hop-gpu`."""

from __future__ import annotations

import ctypes
import functools
from multiprocessing.connection import Connection

from torch import Tensor

BFLOAT16 = 9


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("data", ctypes.c_byte * 128),)


class DirectNccl:
    """A communicator of two ranks; operations go into the stream that they are given."""

    def __init__(self, first: bool, pipe: Connection) -> None:
        self.peer = int(first)
        self._library = library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        library.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int)
        for function in (library.ncclSend, library.ncclRecv):
            function.argtypes = (
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
            )
        identity = UniqueId()
        if first:
            self._check(library.ncclGetUniqueId(ctypes.byref(identity)))
            pipe.send(bytes(identity))
        else:
            identity = UniqueId.from_buffer_copy(pipe.recv())
        self._comm = ctypes.c_void_p()
        self._check(library.ncclCommInitRank(ctypes.byref(self._comm), 2, identity, 1 - self.peer))

    def send(self, rows: Tensor, stream: int) -> None:
        """Send bfloat16 rows to the other rank."""
        self._check(self._library.ncclSend(rows.data_ptr(), rows.numel(), BFLOAT16, self.peer, self._comm, stream))

    def receive(self, out: Tensor, stream: int) -> None:
        """Receive bfloat16 rows from the other rank."""
        self._check(self._library.ncclRecv(out.data_ptr(), out.numel(), BFLOAT16, self.peer, self._comm, stream))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NCCL: expected 0, found error {code}; NCCL_DEBUG=WARN says more")


@functools.cache
def direct(first: bool, pipe: Connection) -> DirectNccl:
    """This process's communicator, made at the first call."""
    return DirectNccl(first, pipe)
