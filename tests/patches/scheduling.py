"""vLLM's real schedulers with the calls that EngineCore makes; only the forwards are made up.

Their results are given to the scheduler as a worker would.
"""

from itertools import count
from pathlib import Path
from typing import Any

import torch

MODEL = Path(__file__).parents[1] / "models" / "qwen3-moe"
BLOCK, CHUNK, BLOCKS = 32, 128, 64
PROMPT = list(range(100, 100 + 2 * CHUNK + 2 * BLOCK + 5))
"""Three steps of prefill."""


class Engine:
    """A scheduler, and the calls that EngineCore makes."""

    def __init__(self, vllm_config: Any, name: str) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from afdpatch.patches import scheduler

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = getattr(scheduler, name)(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
        )
        self.serial = count()

    def add(self, tokens: list[int], max_tokens: int = 8, **more: Any) -> Any:
        """A greedy request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
        params.update_from_generation_config({}, 0)
        request = Request(f"r{next(self.serial)}", tokens, params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def computed(self, step: Any) -> dict[str, str]:
        """The step's forward went well; the reasons of the requests that ended."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(step.num_scheduled_tokens)
        done = {id_: self.scheduler.requests.get(id_) for id_ in ids}
        tokens = [[7] if request is not None and not self._prefills(step, request) else [] for request in done.values()]
        output = ModelRunnerOutput(ids, {id_: index for index, id_ in enumerate(ids)}, tokens)
        return self._ended(self.scheduler.update_from_output(step, output))

    @staticmethod
    def _prefills(step: Any, request: Any) -> bool:
        known = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
        cached = step.scheduled_cached_reqs
        known += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        before = dict(known)[request.request_id]
        return before + step.num_scheduled_tokens[request.request_id] < request.num_prompt_tokens

    def lost(self, step: Any, *, repeat: bool = False) -> dict[str, str]:
        """The step's forward lost its FFN server; the reasons of the requests that ended."""
        from afdpatch.patches.scheduler import LostStep

        return self._ended(self.scheduler.update_from_output(step, LostStep(step, "a test", repeat=repeat)))

    @staticmethod
    def _ended(outputs: Any) -> dict[str, str]:
        every = [one for outputs_ in outputs.values() for one in outputs_.outputs]
        return {one.request_id: str(one.finish_reason) for one in every if one.finish_reason is not None}

    def cached_tokens(self, tokens: list[int]) -> int:
        """How many tokens of a prompt the next request would find in the prefix cache."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request("probe", tokens, SamplingParams(), None, block_hasher=self.hasher)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def run_to_end(self) -> None:
        """Every request that is left, to its end."""
        for _ in range(100):
            if not self.scheduler.has_requests():
                return
            self.computed(self.scheduler.schedule())
        raise AssertionError("requests are left after 100 steps")


def places(step: Any) -> dict[str, tuple[int, int]]:
    """Of each request in a step: how many tokens were computed before it, and how many it computes."""
    cached = step.scheduled_cached_reqs
    known = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    known += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return {id_: (before, step.num_scheduled_tokens[id_]) for id_, before in known}


def ids_of(engine: Engine, request: Any) -> list[int]:
    """The blocks of a request."""
    return list(engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
