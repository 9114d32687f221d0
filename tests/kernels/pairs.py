"""What the tests on GPUs share: a pair of buffers, rows of any bits, and how rows are compared."""

from __future__ import annotations

import pytest
import torch

from afdpatch.kernels import HopBuffers
from afdpatch.kernels.layout import Geometry

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
    return pair[0], pair[1]


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
