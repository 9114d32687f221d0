"""Graph seam: before the attention server replays a CUDA graph, the FFN server is told to replay its half.

A graph that went with its connection (connector `nccl`) isn't replayed; the step is launched eagerly. The hops between
the graphs of a model's pieces are launched one by one, as those of an eager step are.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afdpatch.patches.settings import CAPTURES, HOP_OP, settings_of
from afdpatch.runtime.connectors.base import StepLost

if TYPE_CHECKING:
    from vllm.config import CompilationConfig


def cuda_graph_wrapper_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `CUDAGraphWrapper.__call__`: the whole model's graph (runner V1), or a piece's (both runners)."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self.vllm_config)
        if settings is not None and is_forward_context_available():
            context = get_forward_context()
            shape = context.batch_descriptor
            if context.cudagraph_runtime_mode == self.runtime_mode and shape is not None:
                entry = self.concrete_cudagraph_entries.get(shape)
                captured = entry is not None and entry.cudagraph is not None
                if self.runtime_mode == CUDAGraphMode.PIECEWISE:
                    if not captured:
                        _check_cut(self.compilation_config)
                        context.additional_kwargs[CAPTURES] = True
                elif captured:  # else it is captured now, and the hops with it
                    route = settings.link.route
                    if route.begin_replay(shape.num_tokens):
                        try:
                            return original(self, *args, **kwargs)
                        finally:
                            route.end_replay()
                    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        return original(self, *args, **kwargs)

    return __call__


def _check_cut(compilation: "CompilationConfig") -> None:
    """A hop within a piece would be captured with it, and no replay would tell the FFN server.

    Raises:
        RuntimeError: the model isn't cut at hops, or is cut by Inductor, which `features` ought to have refused.
    """
    if HOP_OP not in (compilation.splitting_ops or ()) or compilation.use_inductor_graph_partition:
        raise RuntimeError(
            f"piecewise CUDA graphs: expected {HOP_OP} among splitting_ops, found {compilation.splitting_ops}; ask for "
            f"cudagraph_mode FULL_DECODE_ONLY, or for --enforce-eager"
        )


def run_fullgraph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `CudaGraphManager.run_fullgraph` (runner V2)."""

    @functools.wraps(original)
    def wrapper(self: Any, desc: Any) -> Any:
        settings = settings_of(self.vllm_config)
        if settings is None:
            return original(self, desc)
        route = settings.link.route
        if not route.begin_replay(desc.num_tokens):
            raise StepLost("the FFN server was lost after this step was planned, and its graph with it")
        try:
            return original(self, desc)
        finally:
            route.end_replay()

    return wrapper


def dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `CudaGraphManager.dispatch` (runner V2): no graph is planned that went with its connection."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    @functools.wraps(original)
    def wrapper(
        self: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        planned = original(
            self, num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )
        settings = settings_of(self.vllm_config)
        if settings is None or planned.cg_mode != CUDAGraphMode.FULL or settings.link.route.graphs_stand():
            return planned
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=planned.num_active_loras,
            num_ubatches=num_ubatches,
        )

    return wrapper
