"""What the tests on GPUs share: a pair of buffers, rows of any bits, and how rows are compared."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from afdpatch.kernels import HopBuffers, reference
from afdpatch.kernels.layout import HEADER_AT, LINE_BYTES, Geometry

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU of compute capability 9.0 or later; none is here"),
]
DEVICES = ("cuda:0", "cuda:1" if GPUS > 1 else "cuda:0")
Pair = tuple[HopBuffers, HopBuffers]


def make(geometry: Geometry, deadline_s: float = 5.0, overlap: bool = True) -> Pair:
    """Connected buffers: the side that sends first, and the other."""
    pair = tuple(
        HopBuffers.create(
            0, 0, "", 0, device, initiator=first, deadline_s=deadline_s, overlap=overlap, geometry=geometry
        )
        for device, first in zip(DEVICES, (True, False), strict=True)
    )
    pair[0].connect(pair[1])
    lanes()
    return pair[0], pair[1]


@functools.cache
def lanes() -> list[torch.cuda.Stream]:
    """A stream of each device for what is copied while a kernel waits, used before: a first use may wait for it."""
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(1 << 18, dtype=torch.uint8).to(stream.device).cpu()
    return streams


def answer(pair: Pair, geometry: Geometry, reply: torch.Tensor, number: int, layer: int, slot: int) -> torch.Tensor:
    """Write a reply into the first side's slot as the reference does, once the request lies whole in the other's.

    The first side's kernel waits for it meanwhile: everything here is copied in streams of its own.

    Returns:
        The rows of the request, as the reference reads them.
    """
    first, second = pair
    end = time.monotonic() + 30
    while True:
        with torch.cuda.stream(lanes()[1]):
            found = second.slot(slot).cpu()
        try:
            request = reference.read(found, geometry, reply.shape[0], number, layer, slot)
            break
        except reference.NotThere as missing:
            assert time.monotonic() < end, f"expected the request, found none after 30 s: {missing}"
    with torch.cuda.stream(lanes()[0]):
        before = first.slot(slot).cpu()
        after = before.clone()
        reference.write(after, geometry, reply, number, layer, slot, initiator=False)
        changed = int((after != before).nonzero().max()) // LINE_BYTES * LINE_BYTES + LINE_BYTES
        # Marks come after their payload; what lies beyond the message is the kernel's to write.
        for part in (slice(HEADER_AT, changed), slice(0, HEADER_AT)):
            first.slot(slot)[part].copy_(after[part])
    return request


def noise(rows: int, geometry: Geometry, device: str) -> torch.Tensor:
    """Any bits, those of NaNs and zeros among them."""
    data = torch.randint(0, 256, (rows, geometry.row_bytes), dtype=torch.uint8, device=device)
    return data.view(getattr(torch, geometry.dtype))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, wherever they lie."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def wait() -> None:
    """For all that was launched."""
    for device in set(DEVICES):
        torch.cuda.synchronize(device)
