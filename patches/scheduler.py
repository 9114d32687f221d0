"""Scheduler seam: a step that lost its FFN server ends neither the engine nor, where it can be repeated, a request.

The attention worker answers such a step with `LostStep`; the schedulers here are vLLM's own, which understand it.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from afdpatch.patches.settings import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

logger = init_logger(f"vllm.{__name__}")


class LostStep(ModelRunnerOutput):
    """The result of a step whose forward was not finished: no tokens for any of its requests.

    Attributes:
        why: what ended the forward, in words.
        repeat: whether the same step may go well next time; else its requests end with an error.
    """

    def __init__(self, scheduler_output: "SchedulerOutput", why: str, *, repeat: bool = False) -> None:
        ids = list(scheduler_output.num_scheduled_tokens)
        super().__init__(req_ids=ids, req_id_to_index={id_: index for index, id_ in enumerate(ids)})
        self.why = why
        self.repeat = repeat


def losses_before(scheduler_output: "SchedulerOutput") -> int | None:
    """How many losses were known when a step was scheduled; None for a step that no scheduler made (a warm-up's).

    A step that was scheduled before a loss was known stands on what that loss left, and is worth nothing.
    """
    return getattr(scheduler_output, "afd_losses", None)


class LostStepScheduler:
    """Mix-in over vLLM's scheduler. A lost step is repeated, or ends every request that is in a step under way.

    vLLM registers the blocks that a step will fill in the prefix cache when it schedules the step. The blocks of a lost
    step hold garbage: they leave the cache before anything else is scheduled. A step that was scheduled after the lost
    one and before its loss was known (asynchronous scheduling) stands on that garbage and is lost as well.

    To repeat it, every request is put back to where it was before the oldest step under way, as if it had been
    preempted there: a request that generates computes the same token at the same place again.
    """

    kv_cache_manager: Any
    requests: dict[str, Any]
    running: list[Any]
    block_size: int
    use_v2_model_runner: bool
    vllm_config: "VllmConfig"
    grammar_compile_error_reqs: set[str]
    prev_step_scheduled_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = settings_of(self.vllm_config)
        self._repeat_s = settings.config.recovery_timeout_s if settings is not None else 0.0
        self._under_way: deque[SchedulerOutput] = deque()
        self._losses = 0
        self._lost_since: float | None = None
        self._repeated: set[str] = set()  # at the last loss
        self._kept: set[str] = set()  # of these, who kept its blocks; until a step goes well
        self._keeps_blocks = False
        self._keepers: list[Any] = []

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """vLLM's own; the step is kept until its result is there."""
        scheduler_output: SchedulerOutput = super().schedule(throttle_prefills)  # type: ignore[misc]
        self._release()
        scheduler_output.afd_losses = self._losses  # type: ignore[attr-defined]  # see `losses_before`
        self._under_way.append(scheduler_output)
        return scheduler_output

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: ModelRunnerOutput
    ) -> "dict[int, EngineCoreOutputs]":
        """vLLM's own; of a lost step, after its blocks have left the prefix cache and its requests were taken care of.

        What a step gave that was scheduled before a loss was known is not looked at.
        """
        if losses_before(scheduler_output) != self._losses:
            model_runner_output = LostStep(scheduler_output, "a step before it was lost")
        elif isinstance(model_runner_output, LostStep):
            self._lose(model_runner_output)
        elif model_runner_output.sampled_token_ids:
            self._lost_since = None
            self._kept.clear()
        while self._under_way and self._under_way.popleft() is not scheduler_output:
            pass
        result: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        return result

    def _lose(self, lost: LostStep) -> None:
        """Put back or fail every request of the steps under way, the oldest of which was lost."""
        self._losses += 1
        now = time.monotonic()
        computed = _computed_before(self._under_way)
        if self._lost_since is None or self._repeated.isdisjoint(computed):
            self._lost_since = now  # nobody is left who waits since the loss before
        self._evict(computed)
        alive = computed.keys() & self.requests.keys()
        repeated: set[str] = set()
        if lost.repeat and now - self._lost_since <= self._repeat_s:
            repeated = {id_ for id_ in alive if self._can_repeat(self.requests[id_])}
            self._put_back({id_: computed[id_] for id_ in repeated}, now)
        self._repeated = repeated
        # The requests that vLLM ends with FINISHED_ERROR at the end of update_from_output, whatever failed them.
        self.grammar_compile_error_reqs.update(alive - repeated)
        logger.error(
            "AFD: a step was lost: %d of its requests go on from before it, %d end with an error. %s",
            len(repeated),
            len(alive) - len(repeated),
            lost.why,
        )

    def _can_repeat(self, request: Any) -> bool:
        """Whether a request would get the tokens that it would have had; its worker keeps too much of it otherwise.

        Not one with a seed on runner V1, whose random numbers are used up by the lost step, nor one that still waits
        for the log-probabilities of its prompt, which come with the prompt's last step and once only.
        """
        params = request.sampling_params
        if params is None:
            return True
        seeded = params.seed is not None and not self.use_v2_model_runner
        return not seeded and (params.prompt_logprobs is None or request.num_output_tokens > 0)

    def _put_back(self, computed: dict[str, int], now: float) -> None:
        """As vLLM preempts requests whose results it drops; but one that generates keeps its blocks.

        The others give theirs back and find in the prefix cache what was computed before, as after any preemption: if
        they kept blocks and needed more, requests that wait for each other's could fill the memory. One that came into
        the batch with a step under way may lack a single token too, and have found all others in blocks that a lost
        step was to fill: vLLM offers blocks to others as soon as it has scheduled them.
        """
        came = _came_with(self._under_way) - self._kept
        self._kept.clear()
        back = [request for request in self.running if request.request_id in computed]
        self.running = [request for request in self.running if request.request_id not in computed]
        for request in reversed(back):  # each goes to the head of the queue
            tokens = computed[request.request_id]
            self._keeps_blocks = 0 < tokens == request.num_tokens - 1 and request.request_id not in came
            self._preempt_request(request, now, drop_stale_output=True)  # type: ignore[attr-defined]
            if self._keeps_blocks:
                request.num_computed_tokens = tokens
                self._keepers.append(request)
                self._kept.add(request.request_id)
            self._keeps_blocks = False
        # As vLLM does where it preempts all: the worker takes these requests out of its batch, and gets their tokens.
        self.prev_step_scheduled_req_ids.clear()

    def _free_request_blocks(self, request: Any) -> None:
        """vLLM's own, but not for a request that is put back."""
        if not self._keeps_blocks:
            super()._free_request_blocks(request)  # type: ignore[misc]

    def _release(self) -> None:
        """Who kept its blocks and wasn't taken into the next step gives them back.

        Another may come before it in the queue and need just those blocks: vLLM's queue ends at who finds no room.
        """
        for request in self._keepers:
            if request.status == RequestStatus.PREEMPTED and request.num_computed_tokens:
                self._free_request_blocks(request)
                request.num_computed_tokens = 0
                self._kept.discard(request.request_id)
        self._keepers.clear()

    def _evict(self, computed: dict[str, int]) -> None:
        """Take the blocks from a request's computed tokens on out of the prefix cache; see `_computed_before`."""
        blocks: set[int] = set()
        for request_id, tokens in computed.items():
            request = self.requests.get(request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                # Aborted or preempted meanwhile: its blocks can't be told from others any more.
                blocks.update(range(len(self.kv_cache_manager.block_pool.blocks)))
                break
            groups = self.kv_cache_manager.get_block_ids(request_id)
            # Groups have block sizes of their own: with several, all of a request's blocks, as vLLM does it itself.
            first = tokens // self.block_size if len(groups) == 1 else 0
            blocks.update(block for group in groups for block in group[first:])
        self.kv_cache_manager.evict_blocks(blocks)


def _computed_before(steps: "Iterable[SchedulerOutput]") -> dict[str, int]:
    """Of each request in `steps`: how many of its tokens had been computed before the first of them."""
    computed: dict[str, int] = {}
    for step in steps:
        cached = step.scheduled_cached_reqs
        known = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
        known += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, tokens in known:
            computed[request_id] = min(tokens, computed.get(request_id, tokens))
    return computed


def _came_with(steps: "Iterable[SchedulerOutput]") -> set[str]:
    """The requests that one of `steps` took into the batch: new ones, and those that had been preempted."""
    came: set[str] = set()
    for step in steps:
        came.update(new.req_id for new in step.scheduled_new_reqs)
        came |= step.scheduled_cached_reqs.resumed_req_ids
    return came


class AfdScheduler(LostStepScheduler, Scheduler):
    """vLLM's scheduler on an attention server."""


class AfdAsyncScheduler(LostStepScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler on an attention server."""
