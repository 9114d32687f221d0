"""What the kernels do, slowly and on the CPU: the bytes of a message in a slot, and the rows in those bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import HEADER_AT, LINES_AT, MARK_BYTES, VECTOR_BYTES, Geometry, place


class NotThere(ValueError):
    """No complete message of that number, layer, micro-batch and number of rows lies in the slot."""


def write(slot: Tensor, geometry: Geometry, rows: Tensor, number: int, layer: int, micro_batch: int) -> None:
    """Write a message as `send` does.

    Args:
        slot: [slot_bytes] uint8 on the CPU, changed in place.
        rows: [rows, hidden] of the geometry's dtype.
        number: the sequence number, 1 to 2**32 - 1.
    """
    spread = geometry.spread(rows.shape[0])
    where = place(layer, micro_batch)
    data = rows.contiguous().view(torch.uint8).flatten()
    if spread.packed:
        slot[HEADER_AT : HEADER_AT + 16] = _bytes([where, number, rows.shape[0], number])
        lines = torch.empty(spread.units, 4, dtype=torch.int32)
        lines[:, 0::2] = data.view(torch.int32).view(-1, 2)
        lines[:, 1::2] = _bytes([number]).view(torch.int32)
        slot[LINES_AT : LINES_AT + 16 * spread.units] = lines.view(torch.uint8).flatten()
        return
    slot[geometry.payload_at : geometry.payload_at + data.numel()] = data
    for block in range(spread.blocks):
        mark = block * MARK_BYTES
        slot[mark : mark + 12] = _bytes([number, where, rows.shape[0]])


def read(slot: Tensor, geometry: Geometry, rows: int, number: int, layer: int, micro_batch: int) -> Tensor:
    """Read a message as `receive` does, and reset its flags in `slot`.

    Returns:
        [rows, hidden] of the geometry's dtype.

    Raises:
        NotThere: a flag or a field of the header is another one.
    """
    spread = geometry.spread(rows)
    where = place(layer, micro_batch)
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    if spread.packed:
        lines = slot[LINES_AT : LINES_AT + 16 * spread.units].view(torch.int32).view(-1, 4)
        flag = _bytes([number]).view(torch.int32)
        header = slot[HEADER_AT : HEADER_AT + 16]
        if not (torch.equal(header, _bytes([where, number, rows, number])) and bool((lines[:, 1::2] == flag).all())):
            raise NotThere(f"packed message {number}, layer {layer}, micro-batch {micro_batch}, {rows} rows")
        data = lines[:, 0::2].clone()
        header.zero_()
        lines.zero_()
        return data.view(torch.uint8).flatten().view(dtype).view(rows, geometry.hidden)
    for block in range(spread.blocks):
        mark = slot[block * MARK_BYTES : block * MARK_BYTES + 12]
        if not torch.equal(mark, _bytes([number, where, rows])):
            raise NotThere(
                f"bulk message {number}, layer {layer}, micro-batch {micro_batch}, {rows} rows, block {block}"
            )
        mark[:4] = 0
    size = spread.units * VECTOR_BYTES
    data = slot[geometry.payload_at : geometry.payload_at + size].clone()
    return data.view(dtype).view(rows, geometry.hidden)


def _bytes(words: list[int]) -> Tensor:
    """Little-endian words of 32 bits."""
    return torch.frombuffer(bytearray(b"".join(word.to_bytes(4, "little") for word in words)), dtype=torch.uint8)
