"""Runner seam: the attention server's steps, counted, timed and numbered."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afdpatch.patches.settings import settings_of

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `GPUModelRunner._model_forward`: one forward of the model is one step."""

    @functools.wraps(original)
    def _model_forward(
        self: "GPUModelRunner",
        input_ids: "torch.Tensor | None" = None,
        positions: "torch.Tensor | None" = None,
        intermediate_tensors: Any = None,
        inputs_embeds: "torch.Tensor | None" = None,
        **model_kwargs: Any,
    ) -> Any:
        settings = settings_of(self.vllm_config)
        if settings is None or settings.link is None:
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        with settings.link.step():
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)

    return _model_forward
