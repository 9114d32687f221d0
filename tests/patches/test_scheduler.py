"""The scheduler seam on vLLM's real schedulers: what a lost step leaves in the prefix cache, and who ends with it."""

import pytest

from .scheduling import BLOCK, BLOCKS, CHUNK, PROMPT, Engine

pytestmark = pytest.mark.e2e


def test_a_lost_chunk_leaves_the_prefix_cache_and_what_was_computed_before_stays(engine: Engine) -> None:
    request = engine.add(PROMPT)
    assert engine.computed(engine.scheduler.schedule()) == {}
    step = engine.scheduler.schedule()
    assert engine.cached_tokens(PROMPT) == 2 * CHUNK  # vLLM registers a step's blocks before they are computed
    assert engine.lost(step) == {request.request_id: "error"}
    assert engine.cached_tokens(PROMPT) == CHUNK
    assert not engine.scheduler.requests
    again = engine.add(PROMPT)
    engine.run_to_end()
    assert again.num_output_tokens == 8
    assert engine.cached_tokens(PROMPT) >= 2 * CHUNK


def test_without_the_eviction_the_garbage_would_be_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.scheduler), "_evict", lambda self, computed: None)
    engine.add(PROMPT)
    engine.computed(engine.scheduler.schedule())
    engine.lost(engine.scheduler.schedule())
    assert engine.cached_tokens(PROMPT) == 2 * CHUNK


def test_a_block_that_a_lost_decode_would_have_filled_leaves_the_cache(engine: Engine) -> None:
    prompt = PROMPT[: 2 * BLOCK - 1]
    request = engine.add(prompt)
    engine.computed(engine.scheduler.schedule())
    step = engine.scheduler.schedule()
    filled = [*prompt, 7, 7]
    assert engine.lost(step) == {request.request_id: "error"}
    assert engine.cached_tokens(filled) == BLOCK


def test_requests_that_wait_are_not_ended_with_the_step_and_those_that_share_its_blocks_are(engine: Engine) -> None:
    first, second = engine.add(PROMPT[: CHUNK - 3]), engine.add([*PROMPT[: CHUNK - BLOCK], 1, 2, 3])
    others = [engine.add(list(range(1000 + 200 * n, 1100 + 200 * n))) for n in range(3)]
    step = engine.scheduler.schedule()
    assert set(step.num_scheduled_tokens) == {first.request_id, second.request_id}
    assert engine.lost(step).keys() == {first.request_id, second.request_id}
    assert engine.cached_tokens(PROMPT) == 0
    engine.run_to_end()
    assert [request.num_output_tokens for request in others] == [8, 8, 8]


def test_an_abort_during_the_lost_step_leaves_nothing_of_it_in_the_cache(engine: Engine) -> None:
    from vllm.v1.request import RequestStatus

    request = engine.add(PROMPT)
    engine.computed(engine.scheduler.schedule())
    step = engine.scheduler.schedule()
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert engine.cached_tokens(PROMPT) == 2 * CHUNK
    assert engine.lost(step) == {}
    assert engine.cached_tokens(PROMPT) == 0  # whose blocks these were can't be told any more: all are gone


@pytest.mark.parametrize("engine", ["AfdAsyncScheduler"], indirect=True)  # the other has one step under way
def test_a_step_that_was_scheduled_before_the_loss_was_known_is_lost_too(engine: Engine) -> None:
    first = engine.add(PROMPT[:CHUNK])
    lost = engine.scheduler.schedule()
    second = engine.add([*PROMPT[: 3 * BLOCK], 1, 2, 3])  # finds the blocks of the step that will be lost
    later = engine.scheduler.schedule()
    assert [new.num_computed_tokens for new in later.scheduled_new_reqs] == [3 * BLOCK]
    assert engine.lost(lost) == {first.request_id: "error", second.request_id: "error"}
    third = engine.add(PROMPT[:CHUNK])
    clean = engine.scheduler.schedule()
    assert engine.computed(later) == {}
    assert [new.num_computed_tokens for new in clean.scheduled_new_reqs] == [0]
    assert engine.computed(clean) == {}
    engine.run_to_end()
    assert third.num_output_tokens == 8


@pytest.mark.parametrize("engine", ["AfdAsyncScheduler"], indirect=True)
def test_two_steps_under_way_that_are_both_lost_leave_what_was_computed_before(engine: Engine) -> None:
    request = engine.add(PROMPT)
    assert engine.computed(engine.scheduler.schedule()) == {}
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert engine.lost(first) == {request.request_id: "error"}
    assert engine.lost(second) == {}
    assert engine.cached_tokens(PROMPT) == CHUNK
    again = engine.add(PROMPT)
    engine.run_to_end()
    assert again.num_output_tokens == 8


def test_a_request_preempted_between_a_step_and_its_loss_leaves_nothing_either(engine: Engine) -> None:
    request = engine.add(PROMPT)
    engine.computed(engine.scheduler.schedule())
    step = engine.scheduler.schedule()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    assert engine.lost(step) == {request.request_id: "error"}
    assert engine.cached_tokens(PROMPT) == 0
    assert not engine.scheduler.requests


def test_losses_one_after_the_other_end_every_request_and_the_pool_is_whole_again(engine: Engine) -> None:
    ended: dict[str, str] = {}
    requests = [engine.add(list(range(500 * n, 500 * n + 150))) for n in range(6)]
    for _ in range(50):
        if not engine.scheduler.has_requests():
            break
        ended |= engine.lost(engine.scheduler.schedule())
    assert ended == {request.request_id: "error" for request in requests}
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1  # one is vLLM's null block
