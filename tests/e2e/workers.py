"""The FFN worker of the tests: the real one, with a switch for zeros and a look at its parameters."""

from typing import Any

import torch

from afdpatch.patches.worker_cpu import FFNWorker
from tests.e2e.recorder import PARAMETERS, record_parameters

record_parameters()


class SwitchableFFNWorker(FFNWorker):
    """Negative control: `zero_ffn(True)` makes every FFN answer zeros from then on."""

    zeroed = False

    def zero_ffn(self, on: bool) -> None:
        """Worker RPC: zeros instead of the FFN, or the FFN again."""
        self.zeroed = on

    def own_parameters(self) -> dict[str, int]:
        """Worker RPC: name -> bytes of this role's parameters."""
        return PARAMETERS

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN, or zeros."""
        result: Any = super().compute(layer, hidden_states)
        return torch.zeros_like(result) if self.zeroed else result
