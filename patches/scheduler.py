"""Scheduler seam: a step that lost its FFN server ends its requests with an error, and not the engine.

The attention worker answers such a step with `LostStep`; the schedulers here are vLLM's own, which understand it.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

logger = init_logger(f"vllm.{__name__}")


class LostStep(ModelRunnerOutput):
    """The result of a step whose forward was not finished: no tokens for any of its requests.

    Attributes:
        why: what ended the forward, in words.
    """

    def __init__(self, scheduler_output: "SchedulerOutput", why: str) -> None:
        ids = list(scheduler_output.num_scheduled_tokens)
        super().__init__(req_ids=ids, req_id_to_index={id_: index for index, id_ in enumerate(ids)})
        self.why = why


class LostStepScheduler:
    """Mix-in over vLLM's scheduler. A lost step ends every request that is in it or in a later step under way.

    vLLM registers the blocks that a step will fill in the prefix cache when it schedules the step. The blocks of a lost
    step hold garbage: they leave the cache before anything else is scheduled. A step that was scheduled after the lost
    one and before its loss was known (asynchronous scheduling) stands on that garbage and is lost as well.
    """

    kv_cache_manager: Any
    requests: dict[str, Any]
    block_size: int
    grammar_compile_error_reqs: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._under_way: deque[SchedulerOutput] = deque()
        self._failed: set[str] = set()

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """vLLM's own; the step is kept until its result is there."""
        scheduler_output: SchedulerOutput = super().schedule(throttle_prefills)  # type: ignore[misc]
        self._under_way.append(scheduler_output)
        return scheduler_output

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: ModelRunnerOutput
    ) -> "dict[int, EngineCoreOutputs]":
        """vLLM's own; of a lost step, after its blocks have left the prefix cache and its requests have been failed."""
        if isinstance(model_runner_output, LostStep):
            self._lose(model_runner_output.why)
        while self._under_way and self._under_way.popleft() is not scheduler_output:
            pass
        result: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        return result

    def _lose(self, why: str) -> None:
        """Fail every request of the steps under way, the oldest of which was lost."""
        computed = _computed_before(self._under_way)
        # Those that an earlier loss failed have left the cache then; what they had can't be found any more.
        self._evict({id_: tokens for id_, tokens in computed.items() if id_ not in self._failed})
        self._failed = set(computed)
        # The requests that vLLM ends with FINISHED_ERROR at the end of update_from_output, whatever failed them.
        self.grammar_compile_error_reqs.update(computed)
        logger.error(
            "AFD: a step was lost, its %d requests end with an error; the server goes on. %s", len(computed), why
        )

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


class AfdScheduler(LostStepScheduler, Scheduler):
    """vLLM's scheduler on an attention server."""


class AfdAsyncScheduler(LostStepScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler on an attention server."""
