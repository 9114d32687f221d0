"""The FFN worker of the tests: the real one, with switches (zeros for each FFN, a lost patch) and its parameters."""

from typing import Any

import torch

from afdpatch.patches.attest import sign
from afdpatch.patches.worker_cpu import FFNWorker
from tests.e2e.recorder import PARAMETERS, record_parameters

record_parameters()


class SwitchableFFNWorker(FFNWorker):
    """Negative control: `zero_ffn(True)` makes every FFN answer zeros from then on."""

    zeroed = False
    kept: Any = None

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

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN, or zeros."""
        result: Any = super().compute(layer, hidden_states)
        return torch.zeros_like(result) if self.zeroed else result
