"""`NcclBuffers`: one side of a hop between two GPUs of any hosts, by NCCL's send and receive in the current stream.

It does what `HopBuffers` does, and two things otherwise. NCCL knows no deadline, so the hosts watch: a step is
`begun`, its last launch `launched`, and `look` aborts the communicator when the GPU doesn't get through in time. And
what a CUDA graph holds is one communicator: a graph ends with it, and another can't take its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .hop import HopCode, HopError, HopStatus
from .nccl_library import IN_PROGRESS, SUCCESS, Communicator, NcclError, describe, new_id

_END_S = 5.0
"""How long `disconnect` waits for the communicator's memory to be given back."""
_PAUSE_S = 0.001


class NcclStatus(HopStatus):
    """NCCL tells no place, but sometimes a reason."""

    why = ""

    def __str__(self) -> str:
        return f"{self.code.name.lower()} ({self.why})" if self.why else self.code.name.lower()


class NcclBuffers:
    """One communicator with one peer, and the rows that are received.

    As with `HopBuffers`, no launch does anything after an error, and `status` tells of it. Launches belong to one
    thread at a time; `abort`, `status` and `look` may be called from any. Use `create`.
    """

    def __init__(
        self,
        max_rows: int,
        hidden: int,
        dtype: str,
        slots: int,
        device: torch.device,
        *,
        initiator: bool,
        deadline_s: float,
    ) -> None:
        self.device = device
        self.initiator = initiator
        self.deadline_s = deadline_s
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._type = dtype
        self._hidden = hidden
        with torch.inference_mode(False):
            # The initiator receives into tensors of its caller.
            rows = 0 if initiator else max_rows
            self._rows = torch.empty(slots, rows, hidden, dtype=self.dtype, device=device)
        self._lock = threading.Lock()  # held for a call of NCCL that doesn't wait
        self._comm: Communicator | None = None
        self._code = HopCode.OK
        self._why = ""
        self._open = False
        self._name = b""
        self._captured = False  # by a graph of somebody else, which an abort waits for
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._ending: threading.Thread | None = None
        self._steps: deque[_Step] = deque()

    @classmethod
    def create(
        cls,
        max_rows: int,
        hidden: int,
        dtype: str,
        slots: int,
        device: torch.device,
        *,
        initiator: bool,
        deadline_s: float = 10.0,
    ) -> NcclBuffers:
        """Buffers on `device` for `slots` micro-batches of at most `max_rows` rows of `hidden` numbers of `dtype`.

        Args:
            initiator: whether this side sends first.
            deadline_s: how long one step may take on the GPU, in seconds, from its beginning or its predecessor's end.
        """
        return cls(max_rows, hidden, dtype, slots, device, initiator=initiator, deadline_s=deadline_s)

    @property
    def connected(self) -> bool:
        """Whether there is a communicator, or the name of one."""
        return self._open

    @staticmethod
    def handle() -> bytes:
        """A new communicator's name, for this side's `open` and the other's. Raises NcclError."""
        return new_id()

    def open(self, handle: bytes) -> None:
        """Take the name of a communicator; `join` has to follow, on both sides at about the same time.

        Raises:
            HopError: there is one already.
        """
        if self._open:
            raise HopError("open: expected buffers without a communicator, found one; call disconnect first")
        self._code, self._why = HopCode.OK, ""
        self._steps.clear()
        self._captured = False
        self._name = handle
        self._open = True

    def join(self, deadline_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Join, and wait until rows have gone both ways, so that no later launch waits for a peer on the host.

        Args:
            deadline_s: CLOCK_MONOTONIC in seconds.
            check: called while it waits; what it raises ends the wait.

        Raises:
            HopError: late, or aborted, or NCCL failed. NcclError: it can't even be begun. It is aborted then.
        """
        try:
            with torch.cuda.device(self.device), self._lock:
                if self._code is HopCode.OK:
                    self._comm = Communicator(self._name, 0 if self.initiator else 1)
            self._settle(deadline_s, check)
            with torch.cuda.device(self.device), torch.inference_mode(False):
                # Of another pool than the streams that compute, which a capture mustn't meet.
                stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    sign = torch.ones(1, self._hidden, dtype=self.dtype, device=self.device)
                    back = torch.zeros_like(sign)
                    if self.initiator:
                        self._move("send", sign, deadline_s, check)
                    self._move("receive", back, deadline_s, check)
                    if not self.initiator:
                        self._move("send", back, deadline_s, check)
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(stream)
                    self._until(done.query, deadline_s, check, "rows that go both ways")
                    self._stands()
                    if not torch.equal(back, sign):
                        raise HopError("joining the communicator: what came over it isn't what was sent")
                    self._keep(sign, deadline_s, check)
            self._stands()
        except BaseException:
            self.abort()
            raise

    def _stands(self) -> None:
        if self._code is not HopCode.OK:
            raise HopError(f"joining the communicator: {self._why or 'the peer has gone'}")

    def _keep(self, sign: Tensor, deadline_s: float, check: Callable[[], None]) -> None:
        """A graph that is never replayed: while it is there, an abort doesn't free what queued launches still need."""
        self._keeper = torch.cuda.CUDAGraph()
        self._keeper.capture_begin(capture_error_mode="thread_local")
        try:
            self._move("send", sign, deadline_s, check)
        finally:
            self._keeper.capture_end()
            self._captured = False

    # Hops

    def send(self, tensor: Tensor, layer: int, micro_batch: int = 0) -> None:
        """Send `tensor` ([rows, hidden], contiguous, on this device); layer and micro-batch aren't told."""
        self._fits(tensor)
        self._move("send", tensor)

    def receive(self, rows: int, layer: int, micro_batch: int = 0, out: Tensor | None = None) -> Tensor:
        """Receive so many rows, which must be as many as are sent.

        Returns:
            [rows, hidden]: `out` where given, else rows of the micro-batch's buffer, valid until the next receive.
        """
        if out is None:
            out = self.view(rows, micro_batch)
        self._fits(out)
        self._move("receive", out)
        return out

    def exchange(self, tensor: Tensor, layer: int, micro_batch: int, out: Tensor) -> Tensor:
        """`send`, then `receive` of as many rows into `out`."""
        self.send(tensor, layer, micro_batch)
        return self.receive(tensor.shape[0], layer, micro_batch, out)

    def view(self, rows: int, micro_batch: int = 0) -> Tensor:
        """[rows, hidden]: where received rows lie."""
        return self._rows[micro_batch][:rows]

    def _move(
        self,
        what: str,
        tensor: Tensor,
        deadline_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        try:
            with self._lock:
                comm = self._comm
                if comm is None:
                    return
                getattr(comm, what)(tensor.data_ptr(), tensor.numel(), self._type, stream)
        except NcclError as error:  # it refuses whatever it is asked for once it has noticed that the peer died
            self._fail(HopCode.ABORTED, str(error))
            return
        self._settle(time.monotonic() + self.deadline_s if deadline_s is None else deadline_s, check)

    def _settle(self, deadline_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Until NCCL has done what it was asked for, or the communicator is aborted."""
        if not self._until(self._settled, deadline_s, check, "NCCL's own work"):
            self._fail(HopCode.DEADLINE, "NCCL took too long")

    def _settled(self) -> bool:
        with self._lock:
            state = SUCCESS if self._comm is None else self._comm.state()
        if state not in (SUCCESS, IN_PROGRESS):
            self._fail(HopCode.ABORTED, f"NCCL says {describe(state)}")
        return state != IN_PROGRESS

    def _until(self, condition: Callable[[], Any], deadline_s: float, check: Callable[[], None], what: str) -> bool:
        """Whether a condition held in time; at once where it holds at once."""
        tries = 0
        while not condition() and self._code is HopCode.OK:
            check()
            if time.monotonic() >= deadline_s:
                self._fail(HopCode.DEADLINE, f"{what}: not done in time")
                return False
            tries += 1
            time.sleep(0 if tries < 1000 else _PAUSE_S)
        return True

    def _fits(self, tensor: Tensor) -> None:
        fits = tensor.dim() == 2 and tensor.shape[1] == self._hidden and tensor.is_contiguous()
        if not fits or tensor.dtype != self.dtype or tensor.device != self.device:
            raise HopError(
                f"hop: expected [rows, {self._hidden}] {self.dtype}, contiguous on {self.device}, found "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )

    # The deadline

    def begun(self) -> None:
        """A step begins; `look` knows from now on for how long it goes on."""
        if self.initiator and self._steps and self._steps[-1].done is None:
            self._steps.pop()  # its forward ended half-way: nothing more is launched for it
        self._steps.append(_Step(time.monotonic()))

    def launched(self) -> None:
        """The last launch of the oldest step that was begun and isn't launched is in the current stream."""
        step = next((step for step in list(self._steps) if step.done is None), None)
        if step is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self.device))
            step.done = done

    def look(self) -> None:
        """Abort if a step takes longer than the deadline, or NCCL has found an error. For a watching thread.

        It asks CUDA about events, which it may do while another thread captures a graph.
        """
        if self._code is not HopCode.OK or not self._open:
            return
        _allow_queries_during_captures()
        now = time.monotonic()
        with contextlib.suppress(IndexError):  # `begun` took the last one back meanwhile
            while self._steps and self._steps[0].done is not None and self._steps[0].done.query():
                self._steps.popleft()
                if self._steps:
                    self._steps[0].since = now
            if self._steps and now - self._steps[0].since > self.deadline_s:
                self._fail(HopCode.DEADLINE, f"a step wasn't through after {self.deadline_s:g} s")
                return
        self._settled()

    # The end

    def status(self) -> HopStatus:
        """OK, DEADLINE, or ABORTED, which is any other end."""
        status = NcclStatus(self._code, 0, 0, 0, 0)
        status.why = self._why
        return status

    def abort(self) -> None:
        """End every wait on the GPU soon, with ABORTED. From any thread, and it doesn't wait."""
        self._fail(HopCode.ABORTED, "")

    def _fail(self, code: HopCode, why: str) -> None:
        with self._lock:
            if self._code is HopCode.OK:
                self._code, self._why = code, why
            comm, self._comm = self._comm, None  # nobody calls it from now on
            if comm is not None:
                self._ending = threading.Thread(target=comm.abort, name="afd-nccl-abort", daemon=True)
                self._ending.start()

    def reset(self) -> None:
        """Nothing: a new communicator begins anew."""

    def disconnect(self) -> None:
        """Abort, and give the communicator back once the GPU is through; graphs that hold it must not be replayed."""
        if not self._open:
            return
        self.abort()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            if self._keeper is not None:
                self._keeper.reset()
                self._keeper = None
        if self._ending is not None and not self._captured:
            self._ending.join(_END_S)
        self._ending = None
        self._steps.clear()
        self._open = False

    def close(self) -> None:
        """`disconnect`; there is nothing else."""
        self.disconnect()


class _Step:
    """One that was begun: since when it counts, and the event behind its last launch."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.done: Any = None  # torch.cuda.Event


@functools.cache
def _cuda_runtime() -> Any:
    """The CUDA runtime that torch has loaded; None where there is none."""
    found = re.search(r"\S+/libcudart\S*\.so\S*", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(found.group()) if found else None


_allowed = threading.local()


def _allow_queries_during_captures() -> None:
    """For this thread: a capture elsewhere forbids questions about events to all who don't say that it's all right."""
    if getattr(_allowed, "yes", False):
        return
    _allowed.yes = True
    runtime = _cuda_runtime()
    if runtime is not None:
        relaxed = ctypes.c_int(2)
        with contextlib.suppress(AttributeError):
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


__all__ = ["NcclBuffers", "NcclError", "NcclStatus"]
