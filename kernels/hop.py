"""`HopBuffers`: one side of a hop between two GPUs of one host, as launches in a stream.

Nothing here waits for the GPU or asks it anything, `reset` and `close` apart; every launch may be captured in a CUDA
graph and the graph replayed as it is.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import build
from .layout import DTYPES, Geometry, LayoutError, Spread, pack_handle, place, unpack_handle

WORDS = 32
"""Of 4 bytes, for the host's words, the first error and the state of each slot on the device."""
RECORD_WORD = 16
SEND, RECEIVE = 1, 2
QUANTISED, NORM = 1, 2
"""Forms of a row-wise launch."""
_REACHED: set[tuple[torch.device, torch.device]] = set()


class HopError(RuntimeError):
    """CUDA refused something, or the buffers are used in a way that can't work."""


class HopCode(enum.IntEnum):
    """How a hop ended."""

    OK = 0
    DEADLINE = 1
    """The peer's message did not come in time: it is dead, or did something else."""
    ABORTED = 2
    """`abort` was called while a wait went on."""
    SEQUENCE = 3
    """A flag was there, and of another message than the awaited one: `expected` and `found` are sequence numbers."""
    PLACE = 4
    """Another layer or micro-batch than the awaited one: `expected` and `found` are layer * 65536 + micro-batch."""
    ROWS = 5
    """Another number of rows than the awaited one."""
    TURN = 6
    """This side sent or received twice: `expected` and `found` are the numbers last sent and last received."""


class HopStatus(NamedTuple):
    """The first error since `create` or `reset`, or OK and zeros."""

    code: HopCode
    layer: int
    micro_batch: int
    expected: int
    found: int

    def __str__(self) -> str:
        if self.code is HopCode.OK:
            return "ok"
        return (
            f"{self.code.name.lower()}: layer {self.layer}, micro-batch {self.micro_batch}: "
            f"expected {self.expected}, found {self.found}"
        )


class _Memory:
    """Bytes on a GPU, as torch takes them without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class HopBuffers:
    """Slots that the peer writes to, the way into the peer's, and the launches that use both.

    A slot belongs to a micro-batch. The initiator (attention) sends first, then receives; the other side (FFN)
    receives, then sends; both in this order for each slot, in one stream or in streams that wait for each other.
    After an error no launch does anything until `reset`: a graph then runs through at once, and what it returns is
    worthless, so look at `status` once a step, after waiting for the step's results as one does anyway.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, initiator: bool, deadline_s: float, overlap: bool
    ) -> None:
        """Use `create`."""
        if device.type != "cuda" or device.index is None:
            raise HopError(f"device: expected a CUDA device with its index, such as cuda:0, found {device}")
        if not 0 < deadline_s <= 3600:
            raise HopError(f"deadline_s: expected above 0 and at most 3600 s, found {deadline_s}")
        self.geometry = geometry
        self.device = device
        self.initiator = initiator
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._library = build.load(torch.cuda.get_device_capability(device))
        self._deadline_ns = int(deadline_s * 1e9)
        self._overlap = overlap
        self._trace: Tensor | None = None
        self._peer = 0
        self._imported = False
        # Inference tensors could not be written to outside of inference mode, as `abort` does from any thread.
        with torch.inference_mode(False), torch.cuda.device(device):
            self._host = torch.zeros(WORDS, dtype=torch.int32, pin_memory=True)
            self._state = torch.zeros((1 + geometry.slots) * WORDS, dtype=torch.int32, device=device)
            pointer = ctypes.c_void_p()
            self._check(
                self._library.afd_hop_allocate(geometry.total_bytes, ctypes.byref(pointer)),
                f"can't allocate {geometry.total_bytes} bytes",
            )
            self._own = int(pointer.value or 0)
            self._memory = torch.as_tensor(_Memory(self._own, geometry.total_bytes), device=device)

    @classmethod
    def create(
        cls,
        max_rows: int,
        hidden: int,
        dtype: str,
        slots: int,
        device: torch.device | str,
        *,
        initiator: bool,
        deadline_s: float = 10.0,
        overlap: bool = True,
        geometry: Geometry | None = None,
    ) -> HopBuffers:
        """Buffers on `device` for `slots` micro-batches of at most `max_rows` rows of `hidden` numbers of `dtype`.

        Args:
            dtype: "bfloat16", "float16", "float32" or "uint8".
            initiator: whether this side sends first.
            deadline_s: how long one wait may take, in seconds; a captured graph keeps it.
            overlap: let a launch begin while its predecessor ends (programmatic dependent launch).
            geometry: instead of the numbers and dtype, with a wire format or tuning of one's own; equal on both sides.

        Raises:
            LayoutError: sizes that can't be.
            HopError: no such device, or not enough memory.
            BuildError: the kernels can't be compiled.
        """
        geometry = geometry or Geometry(max_rows, hidden, dtype, slots)
        return cls(geometry, torch.device(device), initiator, deadline_s, overlap)

    @property
    def connected(self) -> bool:
        """Whether the peer's buffers are open."""
        return bool(self._peer)

    def handle(self) -> bytes:
        """What the peer's `open` needs, `layout.HANDLE_BYTES` bytes. Good for another process, while this one lives."""
        ipc = ctypes.create_string_buffer(64)
        with torch.cuda.device(self.device):
            self._check(self._library.afd_hop_export(self._own, ipc), "can't export the buffers")
        return pack_handle(self.geometry, self.initiator, ipc.raw)

    def open(self, handle: bytes) -> None:
        """Map the peer's buffers. Its GPU must be visible here too and reachable from this one.

        Raises:
            LayoutError: not a handle, or of buffers that don't fit these.
            HopError: open already, or CUDA can't map it.
        """
        self._not_open()
        ipc = unpack_handle(handle, self.geometry, self.initiator)
        pointer = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self._check(
                self._library.afd_hop_import(ipc, ctypes.byref(pointer)),
                "can't map the peer's buffers; the peer must be another process that lives, on a GPU of this host that "
                "CUDA_VISIBLE_DEVICES shows here too",
            )
        self._imported = True
        self._aim(int(pointer.value or 0))

    def connect(self, peer: HopBuffers) -> None:
        """Like `open`, both ways, with buffers of the same process (on another GPU, or for tests on the same).

        Raises:
            HopError: open already, or one GPU can't reach the other.
            LayoutError: the buffers don't fit each other.
        """
        self._not_open()
        peer._not_open()
        unpack_handle(pack_handle(peer.geometry, peer.initiator, bytes(64)), self.geometry, self.initiator)
        for here, there in ((self, peer), (peer, self)):
            if here.device != there.device and (here.device, there.device) not in _REACHED:
                with torch.cuda.device(here.device):
                    self._check(
                        self._library.afd_hop_reach(there.device.index), f"{here.device} can't reach {there.device}"
                    )
                _REACHED.add((here.device, there.device))
            here._aim(there._own)

    def send(self, tensor: Tensor, layer: int, micro_batch: int = 0) -> None:
        """Write `tensor` ([rows, hidden], contiguous, on this device) into the peer's slot of `micro_batch`.

        Quantised by the same launch where the geometry has a `wire` and this side sends first.
        """
        rows = tensor.shape[0]
        rowwise = self._quantised(rows) if self.initiator and self.geometry.wire else None
        self._launch(SEND, rows, layer, micro_batch, tensor, None, rowwise=rowwise)

    def receive(self, rows: int, layer: int, micro_batch: int = 0, out: Tensor | None = None) -> Tensor:
        """Wait on the device for the peer's message of this layer, micro-batch and number of rows.

        Returns:
            [rows, hidden]: `out` where given (rows of a larger batch, too: so several peers' rows come together), else
            a view of the slot, valid until this side sends the next time in this micro-batch. In the geometry's dtype,
            also where they travelled otherwise.
        """
        view = self.view(rows, micro_batch)
        rowwise = self._quantised(rows) if self.geometry.wire and not self.initiator else None
        self._launch(RECEIVE, rows, layer, micro_batch, None, out, view, rowwise)
        return view if out is None else out

    def exchange(self, tensor: Tensor, layer: int, micro_batch: int = 0, out: Tensor | None = None) -> Tensor:
        """`send`, then `receive` of as many rows, in one launch. The initiator's only.

        Quantised rows of which the reply isn't packed take two launches.

        Raises:
            HopError: on the side that answers.
        """
        self._sends_first("exchange", "receive and send")
        rows = tensor.shape[0]
        view = self.view(rows, micro_batch)
        if not self.geometry.wire:
            self._launch(SEND | RECEIVE, rows, layer, micro_batch, tensor, out, view)
        elif self.geometry.spread(rows).packed:
            self._launch(SEND | RECEIVE, rows, layer, micro_batch, tensor, out, view, self._quantised(rows))
        else:
            if out is not None:
                self._fits(out, rows)
            self.send(tensor, layer, micro_batch)
            self._launch(RECEIVE, rows, layer, micro_batch, None, out, view)
        return view if out is None else out

    def send_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, layer: int, micro_batch: int = 0
    ) -> None:
        """`send` the norm of hidden + residual, made by the same launch. The initiator's only.

        What is computed is `reference.norm`, vLLM's `fused_add_rms_norm`, within the rounding stated there; the peer
        receives the rows as any others.

        Args:
            hidden: [rows, hidden] of the geometry's dtype, contiguous.
            residual: the same; becomes hidden + residual in place.
            weight: [hidden] of the same dtype, contiguous from a multiple of 16 bytes.
            eps: added to the mean square.

        Raises:
            LayoutError: the message would travel in bulk (more than `packed_limit` bytes) or quantised, or the rows
                are too long or uint8: compute the norm first, then send.
            HopError: on the side that answers, or a tensor of another shape, dtype, device or layout.
        """
        self._sends_first("send_norm", "receive and send")
        rows = hidden.shape[0]
        rowwise = self._normed(hidden, residual, weight, eps)
        self._launch(SEND, rows, layer, micro_batch, hidden, None, rowwise=rowwise)

    def exchange_norm(
        self,
        hidden: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        layer: int,
        micro_batch: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """`send_norm`, then `receive` of as many rows, in one launch. The initiator's only; raises what they raise."""
        self._sends_first("exchange_norm", "receive and send")
        rows = hidden.shape[0]
        view = self.view(rows, micro_batch)
        rowwise = self._normed(hidden, residual, weight, eps)
        self._launch(SEND | RECEIVE, rows, layer, micro_batch, hidden, out, view, rowwise)
        return view if out is None else out

    def view(self, rows: int, micro_batch: int = 0) -> Tensor:
        """[rows, hidden]: the place in the slot where received rows lie."""
        g = self.geometry
        start = self._slot(micro_batch) + g.payload_at
        return self._memory[start : start + rows * g.row_bytes].view(self.dtype).view(rows, g.hidden)

    def slot(self, micro_batch: int = 0) -> Tensor:
        """[slot_bytes] uint8: the whole slot as the peer writes it; for tests."""
        start = self._slot(micro_batch)
        return self._memory[start : start + self.geometry.slot_bytes]

    def trace(self, times: Tensor | None) -> None:
        """Have each later launch that receives note the GPU's clock (ns) when its message was there.

        Args:
            times: [length] int64 on this device, contiguous; message n goes to entry (n - 1) % length. None: no more.
        """
        if times is not None and (times.dtype != torch.int64 or times.device != self.device or times.dim() != 1):
            raise HopError(f"trace: expected [length] int64 on {self.device}, found {_describe(times)}")
        self._trace = times

    def status(self) -> HopStatus:
        """The first error, read from host memory: no call to the GPU. Complete once the work has been waited for."""
        code, micro_batch, layer, expected, found = (
            word & 0xFFFFFFFF for word in self._host[RECORD_WORD : RECORD_WORD + 5].tolist()
        )
        if code == HopCode.OK:
            return HopStatus(HopCode.OK, 0, 0, 0, 0)
        return HopStatus(HopCode(code), layer, micro_batch, expected, found)

    def abort(self) -> None:
        """End every wait on the device soon (within a millisecond), with ABORTED. From any thread."""
        self._host[0] = 1

    def reset(self) -> None:
        """Forget error, abort and all sequence numbers; waits for the device.

        Both sides do it, neither sends before both are done: that they agree is the caller's business.
        """
        torch.cuda.synchronize(self.device)
        self._memory.zero_()
        self._state.zero_()
        self._host.zero_()
        self._aim(self._peer)

    def disconnect(self) -> None:
        """Unmap the peer's buffers; waits for the device.

        Until another peer's are open and `reset` was called, no launch does anything: captured graphs may be replayed,
        and go on with the new peer.
        """
        if not self._peer:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            self._state[0] = int(HopCode.ABORTED)
            torch.cuda.synchronize(self.device)
            if self._imported:
                self._check(self._library.afd_hop_unimport(self._peer), "can't unmap the peer's buffers")
        self._peer, self._imported = 0, False

    def close(self) -> None:
        """`disconnect` and free the own buffers, which a living peer should have unmapped before. Ends all views."""
        if not self._own:
            return
        self.disconnect()
        with torch.cuda.device(self.device):
            self._check(self._library.afd_hop_free(self._own), "can't free the buffers")
        self._own = 0

    def _quantised(self, rows: int) -> tuple[build.Rowwise, Spread]:
        """The quantised part of a launch."""
        spread = self.geometry.wire_spread(rows)
        return self._rowwise(QUANTISED, spread), spread

    def _normed(self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[build.Rowwise, Spread]:
        """The norm's part of a launch."""
        spread = self.geometry.norm_spread(hidden.shape[0])
        self._fits(residual, hidden.shape[0])
        self._fits(weight.unsqueeze(0), 1)
        return self._rowwise(NORM, spread, residual=residual.data_ptr(), weight=weight.data_ptr(), eps=eps), spread

    def _rowwise(self, form: int, spread: Spread, **norm: float) -> build.Rowwise:
        g = self.geometry
        return build.Rowwise(
            wire_at=g.wire_at,
            form=form,
            item=DTYPES.index(g.dtype),
            hidden=g.hidden,
            chunks=g.chunks,
            units=spread.units,
            per_block=spread.per_block,
            packed=spread.packed,
            gated=spread.blocks > g.packed_ungated,
            **norm,
        )

    def _launch(
        self,
        mode: int,
        rows: int,
        layer: int,
        micro_batch: int,
        source: Tensor | None,
        out: Tensor | None,
        view: Tensor | None = None,
        rowwise: tuple[build.Rowwise, Spread] | None = None,
    ) -> None:
        if not self._peer:
            raise HopError("hop: expected buffers with a peer, found none; call open or connect first")
        for tensor in (source, out):
            if tensor is not None:
                self._fits(tensor, rows)
        g = self.geometry
        spread = g.spread(rows)
        place(layer, micro_batch)
        offset = self._slot(micro_batch)
        if out is None and (spread.packed or rowwise is not None):
            out = view
        # Each block of a launch that sends and receives must send: else the reply could be there before it has begun,
        # and it would count on from it. So the row-wise part's blocks share the reply; a line's place says what it is.
        grid = spread if rowwise is None else rowwise[1]
        trace = self._trace
        launch = build.Launch(
            source=None if source is None else source.data_ptr(),
            out=None if out is None else out.data_ptr(),
            own=self._own + offset,
            state=self._state.data_ptr() + 4 * WORDS * (1 + micro_batch),
            record=self._state.data_ptr(),
            host=self._host.data_ptr(),
            trace=None if trace is None else trace.data_ptr(),
            deadline_ns=self._deadline_ns,
            payload_at=g.payload_at,
            trace_length=0 if trace is None else trace.numel(),
            units=spread.units,
            blocks=grid.blocks,
            threads=grid.threads,
            per_block=-(-spread.units // grid.blocks),
            layer=layer,
            micro_batch=micro_batch,
            rows=rows,
            initiator=self.initiator,
            mode=mode,
            packed=spread.packed,
            gated=grid.blocks > g.packed_ungated,
            overlap=self._overlap,
        )
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            if rowwise is None:
                code = self._library.afd_hop_launch(ctypes.byref(launch), stream)
            else:
                code = self._library.afd_hop_launch_rowwise(ctypes.byref(launch), ctypes.byref(rowwise[0]), stream)
            self._check(code, "can't launch the hop")

    def _sends_first(self, what: str, instead: str) -> None:
        if not self.initiator:
            raise HopError(f"{what}: expected the side that sends first, found the other; use {instead}")

    def _fits(self, tensor: Tensor, rows: int) -> None:
        shape = (rows, self.geometry.hidden)
        if (
            tuple(tensor.shape) != shape
            or tensor.dtype != self.dtype
            or tensor.device != self.device
            or not tensor.is_contiguous()
            or tensor.data_ptr() % 16
        ):
            raise HopError(
                f"hop: expected {list(shape)} {self.dtype}, contiguous from a multiple of 16 bytes on {self.device}, "
                f"found {_describe(tensor)}"
            )

    def _aim(self, peer: int) -> None:
        """Tell the device where the peer's slots are; waits for it."""
        self._peer = peer
        slots = self._state.view(torch.int64).view(-1, WORDS // 2)[1:]
        addresses = [peer and peer + index * self.geometry.slot_bytes for index in range(self.geometry.slots)]
        slots[:, 1] = torch.tensor(addresses, dtype=torch.int64)
        torch.cuda.synchronize(self.device)

    def _slot(self, micro_batch: int) -> int:
        if not 0 <= micro_batch < self.geometry.slots:
            raise LayoutError(
                f"micro_batch: expected 0 to {self.geometry.slots - 1}, found {micro_batch}; make more slots"
            )
        return micro_batch * self.geometry.slot_bytes

    def _not_open(self) -> None:
        if self._peer or not self._own:
            raise HopError(f"open: expected fresh buffers, found {'an open peer' if self._peer else 'closed ones'}")

    def _check(self, code: int, what: str) -> None:
        if code:
            text: Callable[[int], bytes] = self._library.afd_hop_error
            raise HopError(f"{self.device}: {what}: CUDA error {code}, {text(code).decode()}")


def _describe(tensor: Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}{contiguous}"
