"""Graph seam: before the attention server replays a CUDA graph, the FFN server is told to replay its half."""

import functools
from collections.abc import Callable
from typing import Any

from afdpatch.patches.settings import settings_of


def cuda_graph_wrapper_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `CUDAGraphWrapper.__call__` (runner V1)."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self.vllm_config)
        if settings is not None and self.runtime_mode == CUDAGraphMode.FULL and is_forward_context_available():
            context = get_forward_context()
            shape = context.batch_descriptor
            if context.cudagraph_runtime_mode == self.runtime_mode and shape is not None:
                entry = self.concrete_cudagraph_entries.get(shape)
                if entry is not None and entry.cudagraph is not None:  # else it is captured now
                    settings.link.route.begin_replay(shape.num_tokens)
        return original(self, *args, **kwargs)

    return __call__


def run_fullgraph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `CudaGraphManager.run_fullgraph` (runner V2)."""

    @functools.wraps(original)
    def wrapper(self: Any, desc: Any) -> Any:
        settings = settings_of(self.vllm_config)
        if settings is not None:
            settings.link.route.begin_replay(desc.num_tokens)
        return original(self, desc)

    return wrapper
