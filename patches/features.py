"""Each refused feature's check on a complete VllmConfig. The table of manifests/models.yaml says what and why."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afdpatch.patches.models import Tables, tables
from afdpatch.runtime.config import AfdConfig, ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

TRANSPORTS = {"cpu": ("shm", "tcp"), "cuda": ("ipc", "nccl")}
"""What can carry the hops of a server on a device, by vLLM's device type."""
LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
EXECUTORS = (None, "uni", "mp")

Check = Callable[[AfdConfig, "VllmConfig"], Any]
"""Returns what was found (shown to the user) if the feature is on, else something false."""


def _above_one(value: int | None) -> int | None:
    return value if value is not None and value > 1 else None


def _executor(vllm: "VllmConfig") -> str | None:
    backend = vllm.parallel_config.distributed_executor_backend
    return None if backend in EXECUTORS else str(backend)


def _load_balancing(vllm: "VllmConfig") -> str | None:
    parallel = vllm.parallel_config
    if parallel.data_parallel_backend != "mp":
        return f"--data-parallel-backend {parallel.data_parallel_backend}"
    if parallel.data_parallel_external_lb:
        return "external"
    return "hybrid" if parallel.data_parallel_hybrid_lb else None


def _several_nodes(vllm: "VllmConfig") -> str | None:
    parallel = vllm.parallel_config
    if parallel.nnodes > 1:
        return f"--nnodes {parallel.nnodes}"
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    return f"--data-parallel-size-local {local} of --data-parallel-size {size}" if local != size else None


def _offload(vllm: "VllmConfig") -> str | None:
    offload = vllm.offload_config
    on = offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    return "on" if on else None


def _pieces(vllm: "VllmConfig") -> str | None:
    """What cuts the model into pieces for CUDA graphs, if it isn't vLLM's compilation at the splitting ops."""
    from vllm import envs

    compilation = vllm.compilation_config
    if not compilation.cudagraph_mode.has_piecewise_cudagraphs():
        return None
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return "VLLM_USE_BREAKABLE_CUDAGRAPH"
    return "use_inductor_graph_partition" if compilation.use_inductor_graph_partition else None


def _on_gpu(vllm: "VllmConfig") -> bool:
    return bool(vllm.device_config.device_type == "cuda")


CHECKS: dict[str, Check] = {
    "device": lambda afd, c: c.device_config.device_type not in TRANSPORTS and c.device_config.device_type,
    "transport": lambda afd, c: (
        afd.transport not in TRANSPORTS[c.device_config.device_type]
        and f"{afd.connector} on {c.device_config.device_type}"
    ),
    "runner-v2": lambda afd, c: c.device_config.device_type == "cpu" and c.use_v2_model_runner,
    "piecewise-graphs": lambda afd, c: _on_gpu(c) and afd.role == "attention" and _pieces(c),
    "gpu-tensor-parallel": lambda afd, c: _on_gpu(c) and _above_one(c.parallel_config.tensor_parallel_size),
    "gpu-data-parallel": lambda afd, c: _on_gpu(c) and _above_one(c.parallel_config.data_parallel_size),
    "gate-on-attention": lambda afd, c: afd.compute_gate_on_attention,
    "ffn-data-parallel": lambda afd, c: afd.role == "ffn" and _above_one(c.parallel_config.data_parallel_size),
    "load-balancing": lambda afd, c: _load_balancing(c),
    "several-nodes": lambda afd, c: _several_nodes(c),
    "pipeline-parallel": lambda afd, c: _above_one(c.parallel_config.pipeline_parallel_size),
    "context-parallel": lambda afd, c: (
        _above_one(c.parallel_config.prefill_context_parallel_size)
        or _above_one(c.parallel_config.decode_context_parallel_size)
    ),
    "sequence-parallel": lambda afd, c: c.parallel_config.use_sequence_parallel_moe,
    "expert-parallel": lambda afd, c: c.parallel_config.enable_expert_parallel,
    "eplb": lambda afd, c: c.parallel_config.enable_eplb,
    "micro-batches": lambda afd, c: c.parallel_config.enable_dbo or _above_one(c.parallel_config.ubatch_size),
    "quantisation": lambda afd, c: c.model_config.quantization or (c.quant_config and type(c.quant_config).__name__),
    "lora": lambda afd, c: c.lora_config and "on",
    "speculative": lambda afd, c: c.speculative_config and c.speculative_config.method,
    "multimodal": lambda afd, c: c.model_config.is_multimodal_model,
    "pooling": lambda afd, c: c.model_config.runner_type != "generate" and c.model_config.runner_type,
    "kv-transfer": lambda afd, c: (c.kv_transfer_config or c.ec_transfer_config) and "on",
    "routed-experts": lambda afd, c: c.model_config.enable_return_routed_experts,
    "load-format": lambda afd, c: c.load_config.load_format not in LOAD_FORMATS and c.load_config.load_format,
    "load-threads": lambda afd, c: c.load_config.model_loader_extra_config.get("enable_multithread_load"),
    "load-strategy": lambda afd, c: (
        c.load_config.safetensors_load_strategy != "lazy" and c.load_config.safetensors_load_strategy
    ),
    "model-impl": lambda afd, c: c.model_config.model_impl not in ("auto", "vllm") and c.model_config.model_impl,
    "grpc": lambda afd, c: False,  # not in the configuration: see afdpatch.patches.config
    "executor": lambda afd, c: _executor(c),
    "api-servers": lambda afd, c: _above_one(c.parallel_config._api_process_count),
    "headless": lambda afd, c: False,  # known before the configuration is: see afdpatch.patches.config
    "rust-front-end": lambda afd, c: os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
    "cpu-offload": lambda afd, c: _offload(c),
    "weight-transfer": lambda afd, c: c.weight_transfer_config and "on",
    "sleep-mode": lambda afd, c: c.model_config.enable_sleep_mode and "--enable-sleep-mode",
}


ArgumentCheck = Callable[["EngineArgs"], Any]
ARGUMENT_CHECKS: dict[str, ArgumentCheck] = {
    "micro-batches": lambda args: args.enable_dbo or _above_one(args.ubatch_size),
    "eplb": lambda args: args.enable_eplb,
    "sleep-mode": lambda args: args.enable_sleep_mode and "--enable-sleep-mode",
    "context-parallel": lambda args: (
        _above_one(args.prefill_context_parallel_size) or _above_one(args.decode_context_parallel_size)
    ),
}
"""Features that vLLM itself refuses or forgets while it builds its configuration, checked before it does."""


def refuse(table: Tables, feature: str, found: object) -> ConfigError:
    """The error for a refused feature."""
    row = table.refused[feature]
    return ConfigError(row.what, str(found), f"not supported by AFD yet, because {row.why} (see `afdpatch models`)")


def check_pieces(vllm_config: "VllmConfig") -> None:
    """Refuse pieces for CUDA graphs that aren't cut at hops, once vLLM knows which graphs its attention can have.

    Raises:
        ConfigError: as `check_features`.
    """
    if found := _pieces(vllm_config):
        raise refuse(tables(), "piecewise-graphs", found)


def check_arguments(table: Tables, args: "EngineArgs") -> None:
    """Refuse what is known from the arguments alone.

    Raises:
        ConfigError: as `check_features`.
    """
    for feature, check in ARGUMENT_CHECKS.items():
        if found := check(args):
            raise refuse(table, feature, found)


def check_features(table: Tables, afd: AfdConfig, vllm_config: "VllmConfig") -> None:
    """Refuse what AFD doesn't do.

    Raises:
        ConfigError: names the first feature that is on, what was found, and why it is refused.
    """
    for feature, check in CHECKS.items():
        if found := check(afd, vllm_config):
            raise refuse(table, feature, found)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    row = table.row(vllm_config.model_config.architectures)
    if dtype not in row.dtypes:
        raise ConfigError("dtype", dtype, f"allowed for {row.architecture}: {', '.join(row.dtypes)}")
