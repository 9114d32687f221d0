"""Worker seam: the two roles as mix-ins over a platform's own worker (classes: afdpatch.patches.worker_cpu)."""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import CompilationTimes

import afdpatch
from afdpatch.patches import checkpoint
from afdpatch.patches.attest import sign
from afdpatch.patches.features import refuse
from afdpatch.patches.model import ffns
from afdpatch.patches.models import tables
from afdpatch.patches.parallel import FfnGroup, place_of, set_computes_experts, shared_hop
from afdpatch.patches.scheduler import LostStep, losses_before
from afdpatch.patches.settings import AfdSettings, settings_of
from afdpatch.runtime.connectors.base import ConnectorError, FfnConnector, StepLost
from afdpatch.runtime.connectors.factory import ffn_connector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import State, StatusPage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers are on the logger "vllm"

STOP_S = 10.0
"""How long a worker waits for its own thread to end, in seconds."""
STEP_SHARE = 0.9
"""The part of vLLM's deadline of one worker call in which all hops of its forward must be done."""
FFN_ROWS = 1 << 17
"""On a CPU the FFN takes as many rows in a hop as the attention server may send, whose buffer says how many. On a GPU
it takes the tokens of a step that it was started for: so many are computed before what graphs point at is frozen."""
VOLATILE = ("transformers_version",)
"""Keys of a model's configuration that say nothing of the model (beside those that begin with an underscore)."""


def greeting_of(settings: AfdSettings, vllm_config: "VllmConfig", rank: int) -> Greeting:
    """What this worker says of itself; both roles must agree on the model's part."""
    import vllm

    model = vllm_config.model_config
    text = model.hf_text_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if not k.startswith("_") and k not in VOLATILE}
    rows = vllm_config.scheduler_config.max_num_batched_tokens
    if settings.role == "ffn" and vllm_config.device_config.device_type == "cpu":
        rows = FFN_ROWS
    return Greeting(
        role=settings.role,
        rank=rank,
        manifest_digest=settings.digest,
        vllm_version=vllm.__version__,
        model=settings.row.architecture,
        checkpoint=checkpoint.digest(model, vllm_config.load_config),
        config_digest=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        hidden_size=model.get_hidden_size(),
        layers=tuple(range(text.num_hidden_layers)),
        max_rows=rows,
        micro_batches=1,
        num_attention_ranks=settings.config.num_attention_ranks,
        num_ffn_ranks=settings.config.num_ffn_ranks,
        tensor_parallel=settings.config.ffn_tp,
        a2f_dtype=settings.config.a2f_dtype,
    )


class Link:
    """A worker's live side of AFD: the status page, and what the seams count on it.

    Attributes:
        leads: whether this worker is the first of its tensor-parallel group, which alone speaks with the other role.
        rank: the worker's rank among its role's.
    """

    def __init__(self, settings: AfdSettings, vllm_config: "VllmConfig", tp_rank: int) -> None:
        place = place_of(vllm_config.parallel_config, tp_rank)
        self.leads = tp_rank == 0
        self.rank = settings.config.rank + place
        page = StatusPage.from_environment(place)
        if page is None:
            raise RuntimeError(
                "no status page: the server's first process makes it; start the server through vLLM's EngineArgs"
            )
        self.page = page
        self.page.set_worker()
        self.page.set_manifest_digest(settings.digest)
        ours = logging.getLogger("afdpatch")
        theirs = logging.getLogger("vllm")
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)
        self._read = 0
        self._skipped = 0
        self._bytes = 0

    def count_tensor(self, *, read: bool) -> None:
        """Count a tensor of the checkpoint: read from the file, or left in it."""
        self._read += read
        self._skipped += not read
        self.page.set_weights(self._bytes, self._read, self._skipped)

    def count_weights(self, model: torch.nn.Module) -> None:
        """Count the bytes of a model that was just built: what this role allocates."""
        self._bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.page.set_weights(self._bytes, self._read, self._skipped)


class AttentionLink(Link):
    """The attention worker's side: its way to the FFN servers, None on a worker that doesn't lead."""

    def __init__(
        self, settings: AfdSettings, vllm_config: "VllmConfig", tp_rank: int, make_route: Callable[..., Any]
    ) -> None:
        super().__init__(settings, vllm_config, tp_rank)
        self._timeout_s = settings.config.connect_timeout_s
        self._serves = False
        group = vllm_config.parallel_config.tensor_parallel_size
        self._shares = group > 1
        self._step_s = STEP_SHARE * envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        self.route: Any = make_route(settings.config, self.rank, self.page, group=group) if self.leads else None
        self._watch = PeerWatch(self.route, self.page, on_orphaned=_die)

    def connect(self, greeting: Greeting) -> None:
        """Find the FFN servers and greet them; their presence is watched, and that of this server's first process."""
        self._watch.start()
        if self.route is not None:
            logger.info("AFD: attention rank %d, waiting up to %g s for its FFN servers", self.rank, self._timeout_s)
            self.route.connect(greeting)
            logger.info("AFD: the FFN servers are there")

    def wait_ready(self) -> None:
        """Wait until the FFN servers have their weights."""
        if self.route is not None:
            self.route.wait_ready()

    def hop(self, hidden_states: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """A layer's FFN, computed by an FFN server: [rows, hidden] -> the same shape, into ``out``.

        Raises:
            ConnectorError: the step can't go on, on any rank of the tensor-parallel group.
        """
        route = self.route
        if not self._shares:
            assert route is not None
            route.hop(hidden_states, layer, out=out)
            return
        hop = None if route is None else lambda: route.hop(hidden_states, layer)
        out.copy_(shared_hop(get_tp_group(), hop, hidden_states))

    def begin_serving(self) -> None:
        """The warm-up is over."""
        self._serves = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one forward of the model. Its hops end in time for vLLM, whose own deadline is a little later.

        In the warm-up vLLM has no deadline, and an FFN server that ends is waited for as in the rest of the start.
        """
        if self.route is not None and self._serves:
            self.route.begin_step(time.monotonic() + self._step_s)
        elif self.route is not None:
            self.route.begin_step(patience_s=self._timeout_s)
        self.page.begin_step()
        yield
        self.page.end_step()

    def close(self) -> None:
        """End the watch and the connections."""
        if self.route is not None:
            self.route.close()
        self._watch.stop(STOP_S)


class _OneLife:
    """Both roles: what may not change in a worker that serves, since the other role would not change with it.

    `/collective_rpc` and `LLM.collective_rpc` call any method of a worker by its name. Those of weight transfer need no
    refusal: without its configuration, which is refused, vLLM itself does.
    """

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: only this role's tensors would be new; roles agree on a checkpoint at their start."""
        raise refuse(tables(), "weight-transfer", "reload_weights")

    def update_config(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: it changes the model and its weights' place before a reload."""
        raise refuse(tables(), "weight-transfer", "update_config")

    def checkpoint_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: connections of the pair don't outlive it."""
        raise refuse(tables(), "sleep-mode", "checkpoint_prepare")


class AttentionRole(_OneLife):
    """Mix-in of an attention server's worker: vLLM's worker, connected to an FFN server before weights load."""

    vllm_config: "VllmConfig"
    rank: int
    make_route: Callable[..., Any] = Route

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = _settings(self.vllm_config, "attention")
        self.link = self.settings.link = AttentionLink(self.settings, self.vllm_config, self.rank, self.make_route)
        # The rank goes alone by now; its model's classes, built without memory, still want vLLM's group for experts.
        set_computes_experts(self.vllm_config.model_config, True)
        self._lost: LostStep | None = None
        self._losses = 0

    def load_model(self, **kwargs: Any) -> None:
        """Greet, then load this role's weights while the FFN server loads its own."""
        self.link.page.set_state(State.LOADING)
        self.link.connect(greeting_of(self.settings, self.vllm_config, self.link.rank))
        super().load_model(**kwargs)  # type: ignore[misc]
        self.link.wait_ready()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's warm-up, whose forwards hop like any other; then the server is ready."""
        times: CompilationTimes = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.link.begin_serving()
        self.link.page.beat()
        sign()
        self.link.page.set_state(State.READY)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """vLLM's own; a step whose forward can't reach an FFN server is answered with `LostStep`, not with an error.

        An error would end the engine. The scheduler (`afdpatch.patches.scheduler`) repeats the step, or ends its
        requests. One that it scheduled before it knew of a loss stands on tokens that were never sampled (vLLM's
        runner V1 would embed the token -1): it isn't run, and the runner only takes in which requests come and go.
        """
        self._lost = None
        losses = losses_before(scheduler_output)
        try:
            if losses is None or losses >= self._losses or not scheduler_output.total_num_scheduled_tokens:
                return super().execute_model(scheduler_output)  # type: ignore[misc]
            super().execute_model(dataclasses.replace(scheduler_output, total_num_scheduled_tokens=0))  # type: ignore[misc]
            self._lost = LostStep(scheduler_output, "a step before it was lost")
        except ConnectorError as error:
            self._lost = self.lost(scheduler_output, error)
        return self._lost

    def lost(self, scheduler_output: "SchedulerOutput", error: ConnectorError) -> LostStep:
        """The answer to a step that was lost by this; those that were scheduled before it is known are lost as well."""
        losses = losses_before(scheduler_output)
        if losses is not None:
            self._losses = max(self._losses, losses + 1)
        return LostStep(scheduler_output, f"{type(error).__name__}: {error}", repeat=isinstance(error, StepLost))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's own; with asynchronous scheduling vLLM takes a step's result from here, so also of a lost step."""
        if self._lost is not None:
            return self._lost
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def shutdown(self) -> None:
        """vLLM's shutdown, then the connection's."""
        try:
            super().shutdown()  # type: ignore[misc]
        finally:
            self.link.page.set_state(State.STOPPED)
            self.link.close()


class FFNRole(_OneLife):
    """Mix-in of an FFN server's worker: no KV cache, no requests; a thread serves hops."""

    vllm_config: "VllmConfig"
    rank: int
    model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = _settings(self.vllm_config, "ffn")
        self.link = self.settings.link = Link(self.settings, self.vllm_config, self.rank)
        self.ffns: dict[int, torch.nn.Module] = {}
        self.loop: FfnLoop | None = None
        self.group: FfnGroup | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Listen and greet, then load this role's weights; hops wait until `compile_or_warm_up_model`.

        Of a tensor-parallel group the first rank does that; the others wait for what it tells them to compute.
        """
        page = self.link.page
        page.set_state(State.LOADING)
        greeting = greeting_of(self.settings, self.vllm_config, self.link.rank)
        compute, on_idle = self.compute, None
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            dtype: torch.dtype = getattr(torch, greeting.dtype)
            self.group = FfnGroup(get_tp_group(), self.compute, greeting.hidden_size, dtype, page.beat, _die)
            compute, on_idle = self.group.compute, self.group.idle
        if self.link.leads:
            self.loop = FfnLoop(
                self.make_connector(page),
                compute,
                page,
                greeting,
                merge=self.settings.config.merge,
                wrap=self.around_the_loop,
                on_idle=on_idle,
                on_death=_die,
            )
            self.loop.start()
        super().load_model(**kwargs)  # type: ignore[misc]
        found = ffns(self.model_runner.get_model(), self.settings.row)
        self.ffns = {layer: ffn for _, layer, _, ffn in found}

    def make_connector(self, page: StatusPage) -> FfnConnector:
        """The connector of this platform, not listening yet."""
        return ffn_connector(self.settings.config, self.link.rank, page)

    def around_the_loop(self) -> AbstractContextManager[object]:
        """What the loop's thread runs in."""
        return torch.inference_mode()

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """This rank's part of the FFN of one layer: hidden states [rows, hidden] -> the same shape.

        Runs in the loop's thread, or in the group's on a rank that doesn't lead.
        """
        with set_forward_context(None, self.vllm_config, num_tokens=hidden_states.shape[0]):
            result: torch.Tensor = self.ffns[layer](hidden_states)
            return result

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """No layer has a KV cache."""
        return {}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Nothing to allocate; the engine's bookkeeping only."""
        self.vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to warm up; from now on hops are served."""
        if self.group is not None:
            self.group.start()
        if self.loop is not None:
            self.loop.serve()
        sign()
        self.link.page.set_state(State.READY)
        logger.info("AFD: FFN role, serving the FFNs of %d layers", len(self.ffns))
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Never called: the HTTP seam refuses requests.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("an FFN server runs no requests; send them to the attention server")

    def execute_dummy_batch(self) -> None:
        """Nothing to keep in step with."""

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: it would take the weights away under hops."""
        raise refuse(tables(), "sleep-mode", "sleep")

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError, as `sleep`."""
        raise refuse(tables(), "sleep-mode", "wake_up")

    def shutdown(self) -> None:
        """End the loop, then vLLM's shutdown."""
        try:
            if self.loop is not None:
                self.loop.stop(STOP_S)
            if self.group is not None:
                self.group.stop(STOP_S)
            self.link.page.set_state(State.STOPPED)
        finally:
            super().shutdown()  # type: ignore[misc]


def _settings(vllm_config: "VllmConfig", role: str) -> AfdSettings:
    """The settings of this worker, its patches applied and checked.

    Raises:
        RuntimeError: a worker of one role in a server of another, or of none.
    """
    settings = settings_of(vllm_config)
    if settings is None or settings.role != role:
        found = "no AFD settings" if settings is None else f"the role {settings.role}"
        raise RuntimeError(
            f"a worker of the AFD role {role} was started in a server with {found}; leave --worker-cls at auto"
        )
    afdpatch.patchset.apply(role=role, process="worker")
    sign()
    return settings


def _die(error: BaseException) -> None:
    """This worker is of no more use: end it, so that vLLM ends the server."""
    logger.error("AFD: this worker ends: %s: %s", type(error).__name__, error)
    os._exit(1)
