"""What the kernels do, slowly and on the CPU: the bytes of a message in a slot, the rows in those bytes, the formats in
which rows travel, and the norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .layout import CHUNK, GROUP, HEADER_AT, LINES_AT, MARK_BYTES, WORD_BYTES, Geometry, Spread, place

LARGEST = 448.0
"""The largest float8_e4m3fn."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. A group whose scale would be less has the scale 1.0, and comes out as zeros."""
QUANTISED_NAN = 0x7F
NAN_BITS = {2: 0x7FFF, 4: 0x7FFFFFFF}
"""The NaN that comes out, by bytes of a number: as the GPU's own conversions make it."""


class NotThere(ValueError):
    """No complete message of that number, layer, micro-batch and number of rows lies in the slot."""


def write(
    slot: Tensor,
    geometry: Geometry,
    rows: Tensor,
    number: int,
    layer: int,
    micro_batch: int,
    *,
    initiator: bool = True,
) -> None:
    """Write a message as `send` does.

    Args:
        slot: [slot_bytes] uint8 on the CPU, changed in place.
        rows: [rows, hidden] of the geometry's dtype.
        number: the sequence number, 1 to 2**32 - 1.
        initiator: whether the side that sends first is the writer, whose rows travel as `geometry.wire` says.
    """
    spread, payload_at, _ = _way(geometry, rows.shape[0], initiator)
    where = place(layer, micro_batch)
    data = (quantise(rows) if geometry.wire and initiator else rows.contiguous().view(torch.uint8)).flatten()
    if spread.packed:
        slot[HEADER_AT : HEADER_AT + 16] = _bytes([where, number, rows.shape[0], number])
        words = data.numel() // WORD_BYTES
        lines = torch.empty(words, 4, dtype=torch.int32)
        lines[:, 0::2] = data.view(torch.int32).view(-1, 2)
        lines[:, 1::2] = _bytes([number]).view(torch.int32)
        slot[LINES_AT : LINES_AT + 16 * words] = lines.view(torch.uint8).flatten()
        return
    slot[payload_at : payload_at + data.numel()] = data
    for block in range(spread.blocks):
        mark = block * MARK_BYTES
        slot[mark : mark + 12] = _bytes([number, where, rows.shape[0]])


def read(
    slot: Tensor, geometry: Geometry, rows: int, number: int, layer: int, micro_batch: int, *, initiator: bool = True
) -> Tensor:
    """Read a message as `receive` does, and reset its flags in `slot`.

    Args:
        initiator: whether the side that sends first wrote it.

    Returns:
        [rows, hidden] of the geometry's dtype.

    Raises:
        NotThere: a flag or a field of the header is another one.
    """
    spread, payload_at, size = _way(geometry, rows, initiator)
    where = place(layer, micro_batch)
    if spread.packed:
        lines = slot[LINES_AT : LINES_AT + 16 * (size // WORD_BYTES)].view(torch.int32).view(-1, 4)
        flag = _bytes([number]).view(torch.int32)
        header = slot[HEADER_AT : HEADER_AT + 16]
        if not (torch.equal(header, _bytes([where, number, rows, number])) and bool((lines[:, 1::2] == flag).all())):
            raise NotThere(f"packed message {number}, layer {layer}, micro-batch {micro_batch}, {rows} rows")
        data = lines[:, 0::2].clone().view(torch.uint8).flatten()
        header.zero_()
        lines.zero_()
    else:
        for block in range(spread.blocks):
            mark = slot[block * MARK_BYTES : block * MARK_BYTES + 12]
            if not torch.equal(mark, _bytes([number, where, rows])):
                raise NotThere(
                    f"bulk message {number}, layer {layer}, micro-batch {micro_batch}, {rows} rows, block {block}"
                )
            mark[:4] = 0
        data = slot[payload_at : payload_at + size].clone()
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    if geometry.wire and initiator:
        return dequantise(data.view(rows, -1), geometry.hidden, dtype)
    return data.view(dtype).view(rows, geometry.hidden)


def quantise(rows: Tensor) -> Tensor:
    """Rows as they travel with the wire format float8_e4m3fn.

    All in float32, each step rounded to the nearest (ties to even): a group's scale is its largest magnitude / 448, or
    1.0 where that is below `SMALLEST_SCALE`; a number becomes number * (1 / scale), limited to 448 and rounded. A NaN
    stays one and doesn't count for its group's scale. A group with an infinity has the scale infinity and comes out as
    NaNs: it has no numbers that mean anything, and what follows shall show it.

    Args:
        rows: [rows, hidden] bfloat16, float16 or float32 on the CPU; hidden is a multiple of 16.

    Returns:
        [rows, wire_row_bytes] uint8: the 8-bit numbers, the scales, and zeros up to a multiple of 16 bytes.
    """
    count, hidden = rows.shape
    groups = -(-hidden // GROUP)
    grouped = functional.pad(rows.float(), (0, groups * GROUP - hidden)).view(count, groups, GROUP)
    amax = grouped.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=2)
    scale = amax / LARGEST
    scale = torch.where(scale >= SMALLEST_SCALE, scale, 1.0)
    scaled = (grouped * (1.0 / scale)[:, :, None]).view(count, -1)[:, :hidden]
    numbers = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    numbers = torch.where(scaled.isnan(), QUANTISED_NAN, numbers)
    scales = functional.pad(scale, (0, -(-hidden // CHUNK) * CHUNK // GROUP - groups)).view(torch.uint8)
    return torch.cat((numbers, scales.view(count, -1)), dim=1)


def dequantise(wire: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """The rows that come out of what `quantise` made: number * scale in float32, rounded to `dtype`.

    Args:
        wire: [rows, wire_row_bytes] uint8 on the CPU.

    Returns:
        [rows, hidden] of `dtype`; NaNs have the bits `NAN_BITS`.
    """
    count, groups = wire.shape[0], -(-hidden // GROUP)
    numbers = wire[:, :hidden].contiguous().view(torch.float8_e4m3fn).float()
    scales = wire[:, hidden : hidden + 4 * groups].contiguous().view(torch.float32)
    values = numbers * scales.repeat_interleave(GROUP, dim=1)[:, :hidden]
    rows = values.to(dtype)
    bits = rows.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    bits[values.isnan()] = NAN_BITS[dtype.itemsize]
    return rows.view(count, hidden)


def norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """vLLM's `fused_add_rms_norm` as its IR has it (vllm/ir/ops/layernorm.py), which is what torch.compile takes.

    The sum of hidden and residual is taken in float32. It is rounded for the residual only: its mean square and the
    norm come from the sum as it is. The norm is rounded to the dtype, multiplied by the weight, and rounded again. (The
    kernel of vLLM's extension rounds the sum first.)

    The fused launch adds the squares in another order: its residual is the same bit for bit, its rows are at most two
    steps of the dtype off (bfloat16, float16: one from the rounding before the weight, which may move the product by
    two), or 1e-5 of the number (float32).

    Args:
        hidden, residual: [rows, hidden] bfloat16, float16 or float32.
        weight: [hidden] of the same dtype.

    Returns:
        The normed rows and the new residual, both [rows, hidden] of the dtype.
    """
    total = hidden.float() + residual.float()
    variance = total.pow(2).mean(dim=-1, keepdim=True)
    return (total * torch.rsqrt(variance + eps)).to(weight.dtype) * weight, total.to(residual.dtype)


def _way(geometry: Geometry, rows: int, initiator: bool) -> tuple[Spread, int, int]:
    """How a message goes, where its bytes lie in bulk, and how many they are."""
    if geometry.wire and initiator:
        return geometry.wire_spread(rows), geometry.wire_at, rows * geometry.wire_row_bytes
    return geometry.spread(rows), geometry.payload_at, rows * geometry.row_bytes


def _bytes(words: list[int]) -> Tensor:
    """Little-endian words of 32 bits."""
    return torch.frombuffer(bytearray(b"".join(word.to_bytes(4, "little") for word in words)), dtype=torch.uint8)
