"""Config seam: from `additional_config["afd"]` to a server that is whole, or none at all."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import afdpatch
from afdpatch.patches.attest import call_the_roll
from afdpatch.patches.checkpoint import require_safetensors
from afdpatch.patches.features import check_arguments, check_features, refuse
from afdpatch.patches.models import tables
from afdpatch.patches.parallel import check_patience, check_ranks, set_computes_experts, workers_of
from afdpatch.patches.settings import HOP_OP, AfdSettings
from afdpatch.registry import Finding, PatchError
from afdpatch.runtime.config import AfdConfig, ConfigError
from afdpatch.runtime.status import ENVIRONMENT_KEY, StatusPage

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SchedulerConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

USAGE = 2
"""Exit code of a configuration that AFD doesn't take."""
FFN_KV_BYTES = 1 << 20
"""An FFN server has no KV cache; any explicit size keeps vLLM from reserving most of the memory for one."""
SHUTDOWN_S = 10
"""Seconds that requests in flight have at SIGTERM. vLLM's own default, 0, kills the EngineCore at once, which then can
leave its shared memory behind."""
GRPC_SERVER = "vllm.entrypoints.launchers.grpc_server"
"""vLLM's module of the gRPC server."""
WORKERS = {"cpu": "afdpatch.patches.worker_cpu", "cuda": "afdpatch.patches.worker_gpu"}
"""Module of the role's workers, by vLLM's device type."""
SCHEDULERS = {False: "afdpatch.patches.scheduler.AfdScheduler", True: "afdpatch.patches.scheduler.AfdAsyncScheduler"}
"""The attention role's scheduler, by whether vLLM schedules asynchronously."""


def create_engine_config(
    original: Callable[..., "VllmConfig"],
) -> Callable[..., "VllmConfig"]:
    """Around `EngineArgs.create_engine_config`: the original alone without AFD, a checked role with it."""

    @functools.wraps(original)
    def wrapper(
        self: "EngineArgs", usage_context: "UsageContext | None" = None, headless: bool = False
    ) -> "VllmConfig":
        if not _is_on(self.additional_config):
            return original(self, usage_context, headless)
        serving = usage_context is not None and usage_context.name == "OPENAI_API_SERVER"
        try:
            return _with_afd(original, self, usage_context, headless)
        except ConfigError as error:
            if serving:
                sys.exit(_say(f"afdpatch: {error}", USAGE))
            raise
        except PatchError as error:
            if serving:
                sys.exit(_say(f"afdpatch: this server's patches can't be applied whole: {error}", error.exit_code))
            raise

    return wrapper


def _is_on(additional: object) -> bool:
    """Whether a user's additional_config asks for AFD, in the right words or in nearly the right ones."""
    return isinstance(additional, Mapping) and any(_means_afd(key) for key in additional)


def _means_afd(key: object) -> bool:
    return isinstance(key, str) and (key.lower() == "afd" or key.lower().startswith("afd_"))


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr, flush=True)
    return code


def _with_afd(
    original: Callable[..., "VllmConfig"], args: "EngineArgs", usage: "UsageContext | None", headless: bool
) -> "VllmConfig":
    from vllm import envs

    given: Mapping[str, Any] = args.additional_config
    if "afd" not in given:
        near = next(key for key in given if _means_afd(key))
        raise ConfigError(near, "a key of --additional-config", 'AFD\'s settings stand under the key "afd"')
    afd = AfdConfig.parse(given["afd"], rpc_deadline_s=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    if headless:
        raise refuse(tables(), "headless", "--headless")
    if (found := _grpc()) is not None:
        raise refuse(tables(), "grpc", found)
    check_arguments(tables(), args)
    others = {key: value for key, value in given.items() if key != "afd"}
    _settle(args, afd)
    vllm_config = original(args, usage, headless)
    row = tables().row(vllm_config.model_config.architectures)
    check_features(tables(), afd, vllm_config)
    require_safetensors(vllm_config.model_config.model, vllm_config.load_config.load_format)
    _check_worker(vllm_config.parallel_config.worker_cls, afd.role)
    parallel = vllm_config.parallel_config
    check_ranks(afd, parallel)
    check_patience(afd, parallel)
    if afd.role == "attention":
        _settle_scheduler(vllm_config.scheduler_config)
        _cut_at_hops(vllm_config.compilation_config)
        if parallel.data_parallel_size > 1:
            set_computes_experts(vllm_config.model_config, False)
            parallel.is_moe_model = False  # vLLM wrote down what it was before this was known
    _verify()
    afdpatch.patchset.apply(role=afd.role, process="api")
    vllm_config.additional_config = settings = AfdSettings(afd, row, afdpatch.patchset.digest, others)
    # A page that the environment names is another server's, whose child this process is.
    page = StatusPage.create(afd.role, settings.digest, ranks=workers_of(parallel), first_rank=afd.rank)
    os.environ[ENVIRONMENT_KEY] = page.path
    settings.kept = page, call_the_roll(afd.role, engines=parallel.data_parallel_size, workers=workers_of(parallel))
    return vllm_config


def _grpc() -> str | None:
    """What starts the gRPC server, if anything does: vLLM imports its module for nothing else.

    The option may stand in a file of options or be shortened, and the module may be run itself.
    """
    if "--grpc" in sys.argv:
        return "--grpc"
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return GRPC_SERVER if GRPC_SERVER in sys.modules or (main is not None and main.name == GRPC_SERVER) else None


def _settle(args: "EngineArgs", afd: AfdConfig) -> None:
    """Set what the role needs where the user left vLLM's default."""
    from vllm.platforms import current_platform

    workers = WORKERS.get(current_platform.device_type)
    if workers is None:
        raise refuse(tables(), "device", current_platform.device_type)
    if args.worker_cls == "auto":
        args.worker_cls = f"{workers}.{'AttentionWorker' if afd.role == 'attention' else 'FFNWorker'}"
    if args.shutdown_timeout == 0:
        args.shutdown_timeout = SHUTDOWN_S
    if args.safetensors_load_strategy is None:
        args.safetensors_load_strategy = (
            "lazy"  # vLLM's choice may read whole files ahead, the other role's tensors too
        )
    if afd.role == "ffn":
        if current_platform.device_type == "cuda":
            _settle_gpu(args)
        if args.enable_prefix_caching:
            raise ConfigError(
                "--enable-prefix-caching", "on", "the FFN server has no KV cache to keep prefixes in; leave it out"
            )
        args.enable_prefix_caching = False
        if args.kv_cache_memory_bytes is None:
            args.kv_cache_memory_bytes = FFN_KV_BYTES


def _settle_gpu(args: "EngineArgs") -> None:
    """An FFN server on a GPU compiles and captures no forward of the model: its graphs are those of the steps.

    It runs none either: of the two runners it takes the one with which it was measured, whatever vLLM's default is.
    """
    args.enforce_eager = True
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # for this server's other processes too


def _cut_at_hops(compilation: "CompilationConfig") -> None:
    """A model that vLLM cuts into pieces at attention is cut at hops too.

    Piecewise graphs end before a hop and go on behind it. And a hop has the name of its layer among its arguments:
    with it within, no two layers' pieces are alike, and each is compiled by itself.
    """
    cuts = compilation.splitting_ops
    if cuts and HOP_OP not in cuts and not compilation.use_inductor_graph_partition:
        cuts.append(HOP_OP)


def _verify() -> None:
    """Hold the whole set against the installed vLLM, the entries of the server's other processes too.

    Raises:
        PatchError: the gravest finding.
    """
    report = afdpatch.patchset.verify()
    findings: list[tuple[str | None, Finding]] = [(None, finding) for finding in report.findings]
    findings += [(entry.entry.id, finding) for entry in report.entries for finding in entry.findings]
    for patch_id, finding in findings:
        if finding.verdict is report.verdict:
            raise finding.as_error(patch_id)


def _check_worker(worker_cls: Any, role: str) -> None:
    """A worker class of the user's own must still be the role's."""
    from afdpatch.patches.worker import AttentionRole, FFNRole

    expected = AttentionRole if role == "attention" else FFNRole
    if not _is_subclass(worker_cls, expected):
        allowed = f"auto, or a subclass of {expected.__module__}.{expected.__qualname__}"
        raise ConfigError("--worker-cls", str(worker_cls), f"allowed for the role {role}: {allowed}")


def _settle_scheduler(scheduler: "SchedulerConfig") -> None:
    """Ours in the place of vLLM's; one of the user's own must understand lost steps too."""
    from afdpatch.patches.scheduler import AfdAsyncScheduler, AfdScheduler, LostStepScheduler

    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    elif not _is_subclass(scheduler.scheduler_cls, LostStepScheduler):
        allowed = " or ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in (AfdScheduler, AfdAsyncScheduler))
        raise ConfigError(
            "--scheduler-cls",
            str(scheduler.scheduler_cls),
            f"allowed for the role attention: none, or a subclass of {allowed}",
        )


def _is_subclass(given: Any, expected: type) -> bool:
    """Of a class, or of `module.Class` as vLLM's options name one."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = resolve_obj_by_qualname(given) if isinstance(given, str) else given
    return isinstance(found, type) and issubclass(found, expected)
