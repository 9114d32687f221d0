"""The FFN worker of the GPU tests: the real one, with a switch that makes every FFN answer zeros, in graphs too."""

from typing import Any

import torch

from afdpatch.patches.worker_gpu import FFNWorker


class SwitchableFFNWorker(FFNWorker):
    """Negative control: each FFN's result is multiplied by a number on the device, 1 or 0."""

    def load_model(self, **kwargs: Any) -> None:
        """The real thing, after the number is there."""
        with torch.inference_mode(False):
            self.factor = torch.ones((), dtype=self.model_config.dtype, device=self.device)
        super().load_model(**kwargs)

    def zero_ffn(self, on: bool) -> None:
        """Worker RPC: zeros instead of the FFN, or the FFN again."""
        with torch.inference_mode(False):
            self.factor.fill_(0.0 if on else 1.0)
        torch.cuda.synchronize()

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN, or zeros."""
        return super().compute(layer, hidden_states) * self.factor
