"""GPU buffers that aren't on a GPU: two threads of one process hop through queues, with the same turns and endings.

They let the hosts' side of the `ipc` connector run where there is no GPU; what the GPU does is tested on one.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afdpatch.kernels import HopCode, HopStatus
from afdpatch.kernels.layout import Geometry, pack_handle, unpack_handle


class StandInBuffers:
    """As `HopBuffers`; a side finds the other by its handle."""

    sides: list[StandInBuffers] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, geometry: Geometry, initiator: bool, deadline_s: float) -> None:
        self.geometry, self.initiator, self.deadline_s = geometry, initiator, deadline_s
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.device = "cpu"
        self.arrived: queue.Queue[tuple[Tensor, int]] = queue.Queue()
        self.peer: StandInBuffers | None = None
        self.reset()
        self.sides.append(self)

    @classmethod
    def create(cls, *sizes: Any, initiator: bool, deadline_s: float, geometry: Geometry) -> StandInBuffers:
        """As `HopBuffers.create`; the device is left out."""
        assert sizes[:4] == (geometry.max_rows, geometry.hidden, geometry.dtype, geometry.slots)
        return cls(geometry, initiator, deadline_s)

    @property
    def connected(self) -> bool:
        return self.peer is not None

    def handle(self) -> bytes:
        return pack_handle(self.geometry, self.initiator, self.sides.index(self).to_bytes(64, "little"))

    def open(self, handle: bytes) -> None:
        self.peer = self.sides[int.from_bytes(unpack_handle(handle, self.geometry, self.initiator), "little")]

    def disconnect(self) -> None:
        self.peer = None

    def reset(self) -> None:
        self.code, self.aborted = HopCode.OK, False
        self.arrived = queue.Queue()

    def close(self) -> None:
        self.peer = None

    def abort(self) -> None:
        self.aborted = True

    def status(self) -> HopStatus:
        return HopStatus(self.code, 0, 0, 0, 0)

    def view(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.geometry.hidden, dtype=self.dtype)

    def send(self, tensor: Tensor, layer: int, micro_batch: int = 0) -> None:
        if self.peer is not None and self.code is HopCode.OK:
            self.peer.arrived.put((tensor.clone(), layer))

    def receive(self, rows: int, layer: int, micro_batch: int = 0) -> Tensor:
        until = time.monotonic() + self.deadline_s
        while self.code is HopCode.OK:
            try:
                tensor, sent_layer = self.arrived.get(timeout=0.01)
            except queue.Empty:
                if self.aborted:
                    self.code = HopCode.ABORTED
                elif time.monotonic() > until:
                    self.code = HopCode.DEADLINE
                continue
            assert (sent_layer, tensor.shape[0]) == (layer, rows)
            return tensor
        return self.view(rows)

    def exchange(self, tensor: Tensor, layer: int, micro_batch: int, out: Tensor) -> Tensor:
        self.send(tensor, layer)
        return out.copy_(self.receive(tensor.shape[0], layer))


class StandInGraph:
    """A captured step: ``replay`` runs it again."""

    def __init__(self) -> None:
        self.step: Callable[[], None] = lambda: None

    def replay(self) -> None:
        self.step()
