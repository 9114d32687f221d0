"""What the tests of the scheduler seam share."""

from collections.abc import Iterator
from typing import Any

import pytest

from .scheduling import BLOCK, BLOCKS, CHUNK, MODEL, Engine


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    """One configuration of the model, as a stock server would have it."""
    from vllm.engine.arg_utils import EngineArgs

    args = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16, "block_size": BLOCK, "max_model_len": 1024}
    config = EngineArgs(model=str(MODEL), kv_cache_memory_bytes=1 << 27, **args).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


@pytest.fixture(params=["AfdScheduler", "AfdAsyncScheduler"])
def engine(request: pytest.FixtureRequest, vllm_config: Any) -> Iterator[Engine]:
    """A scheduler of each kind."""
    vllm_config.scheduler_config.async_scheduling = request.param == "AfdAsyncScheduler"
    yield Engine(vllm_config, request.param)


@pytest.fixture
def repeating(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(engine.scheduler, "_repeat_s", 3600.0)
    return engine
