"""NCCL's own calls, as far as a hop needs them: a communicator of two ranks that never makes a host wait.

It is NCCL's non-blocking mode: each call returns at once and `state` says whether what it asked for is done, so that
every wait is the caller's and has the caller's deadline. torch.distributed and vLLM's PyNccl don't give that away: the
first takes three times as long for a hop, the second waits in `ncclCommInitRank` for a peer that may never come.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
TYPES = {"uint8": 1, "float16": 6, "float32": 7, "bfloat16": 9}
_MAGIC, _VERSION, _UNDEFINED = 0xCAFEBEEF, 21400, -(1 << 31)
# No multicast over NVLink; and NCCL would keep the addresses of a graph's tensors beyond the graph.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}


class NcclError(RuntimeError):
    """NCCL isn't there, or refused something."""


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("data", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14, which every later version takes and fills up with its defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
    )


@functools.cache
def _library() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch for CUDA has loaded it
    except OSError as error:
        raise NcclError(f"expected libnccl.so.2, which torch for CUDA brings, found none ({error})") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclCommInitRankConfig.argtypes = (
        ctypes.POINTER(pointer), number, _UniqueId, number, ctypes.POINTER(_Config),
    )  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = (pointer, ctypes.POINTER(number))
    library.ncclCommAbort.argtypes = (pointer,)
    for function in (library.ncclSend, library.ncclRecv):
        function.argtypes = (pointer, size, number, number, pointer, pointer)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> int:
    """NCCL's version, such as 22809 for 2.28.9."""
    found = ctypes.c_int()
    _library().ncclGetVersion(ctypes.byref(found))
    return found.value


def new_id() -> bytes:
    """A name for a new communicator, `ID_BYTES` long: the other rank finds this process by it.

    Raises:
        NcclError: no NCCL, or no network interface that it takes.
    """
    identity = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(identity)), "a new communicator's name")
    return bytes(identity)


def describe(code: int) -> str:
    """NCCL's words for a result."""
    return f"{_library().ncclGetErrorString(code).decode()} ({code})"


def _check(code: int, what: str) -> None:
    if code not in (SUCCESS, IN_PROGRESS):
        raise NcclError(f"{what}: NCCL says {describe(code)}; NCCL_DEBUG=WARN says more")


class Communicator:
    """Two ranks, each on the GPU that was current when it was made.

    No call waits: after each, and after the constructor, nothing more may be asked before `state` is SUCCESS. Nothing
    at all may be called after `abort`.

    Args:
        identity: from one side's `new_id`.
        rank: 0 at that side, 1 at the other.

    Raises:
        NcclError: it can't be begun.
    """

    def __init__(self, identity: bytes, rank: int) -> None:
        if len(identity) != ID_BYTES:
            raise NcclError(f"name of the communicator: expected {ID_BYTES} bytes, found {len(identity)}")
        self._peer = 1 - rank
        self._nccl = _library()
        self._comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED)
        named = _UniqueId.from_buffer_copy(identity)
        _check(
            self._nccl.ncclCommInitRankConfig(ctypes.byref(self._comm), 2, named, rank, ctypes.byref(config)),
            "joining the communicator",
        )

    def state(self) -> int:
        """SUCCESS: what was asked for is done (a send or receive: is in its stream); IN_PROGRESS; else an error."""
        state = ctypes.c_int()
        code = self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        return int(code) or state.value

    def send(self, pointer: int, numbers: int, dtype: str, stream: int) -> None:
        """Put the sending of so many numbers into a stream."""
        self._move(self._nccl.ncclSend, pointer, numbers, dtype, stream)

    def receive(self, pointer: int, numbers: int, dtype: str, stream: int) -> None:
        """Put the receiving of so many numbers into a stream."""
        self._move(self._nccl.ncclRecv, pointer, numbers, dtype, stream)

    def abort(self) -> None:
        """End all that waits on the GPU, at once; then free the communicator, once no CUDA graph has it any more.

        It returns after that, so call it where waiting does no harm.
        """
        self._nccl.ncclCommAbort(self._comm)

    def _move(self, function: Callable[..., int], pointer: int, numbers: int, dtype: str, stream: int) -> None:
        _check(function(pointer, numbers, TYPES[dtype], self._peer, self._comm, stream), "a hop")
