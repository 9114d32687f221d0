"""The real FFN worker and the real scheduler with switches: zeros for each FFN, a lost patch, a death, a kept cache."""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from afdpatch.patches.attest import sign
from afdpatch.patches.scheduler import AfdScheduler
from afdpatch.patches.worker_cpu import FFNWorker
from tests.e2e.recorder import PARAMETERS, record_parameters
from tests.e2e.servers import KEEP_GARBAGE

record_parameters()


class SwitchableFFNWorker(FFNWorker):
    """Negative control: `zero_ffn(True)` makes every FFN answer zeros from then on."""

    zeroed = False
    kept: Any = None
    death: tuple[int, int, int] | None = None

    def zero_ffn(self, on: bool) -> None:
        """Worker RPC: zeros instead of the FFN, or the FFN again."""
        self.zeroed = on

    def lose_a_patch(self, on: bool) -> None:
        """Worker RPC: somebody takes a patch away (or puts it back), and the worker attests again."""
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        if on:
            type(self).kept = BaseModelLoader.create_model
        BaseModelLoader.create_model = type(self).kept.__wrapped__ if on else type(self).kept
        sign()

    def own_parameters(self) -> dict[str, int]:
        """Worker RPC: name -> bytes of this role's parameters."""
        return PARAMETERS

    def die_at(self, layer: int, rows: int, times: int) -> None:
        """Worker RPC: `kill -9` of this worker within its next `times`-th hop of a layer with at least so many rows."""
        self.death = layer, rows, times

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN, or zeros, or death."""
        if self.death is not None and layer == self.death[0] and hidden_states.shape[0] >= self.death[1]:
            self.death = *self.death[:2], self.death[2] - 1
            if self.death[2] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        result: Any = super().compute(layer, hidden_states)
        return torch.zeros_like(result) if self.zeroed else result


class SwitchableScheduler(AfdScheduler):
    """Negative control: while a file exists, nothing leaves the prefix cache."""

    def _evict(self, computed: dict[str, int]) -> None:
        if not Path(os.environ[KEEP_GARBAGE]).exists():
            super()._evict(computed)
