"""Lost steps that are repeated: the scheduler puts their requests back, and the worker answers and takes them."""

from typing import Any

import pytest

from .scheduling import BLOCK, BLOCKS, CHUNK, PROMPT, Engine, ids_of, places

pytestmark = pytest.mark.e2e


def test_a_step_that_generates_is_repeated_at_the_same_places_with_the_same_blocks(repeating: Engine) -> None:
    requests = [repeating.add(list(range(500 * n, 500 * n + 40))) for n in range(3)]
    repeating.computed(repeating.scheduler.schedule())
    repeating.computed(repeating.scheduler.schedule())
    step = repeating.scheduler.schedule()
    blocks = {r.request_id: repeating.scheduler.kv_cache_manager.get_block_ids(r.request_id) for r in requests}
    assert repeating.lost(step, repeat=True) == {}
    again = repeating.scheduler.schedule()
    assert places(again) == places(step) == {request.request_id: (41, 1) for request in requests}
    assert list(again.num_scheduled_tokens) == list(step.num_scheduled_tokens)
    assert {id_: repeating.scheduler.kv_cache_manager.get_block_ids(id_) for id_ in blocks} == blocks
    resumed = again.scheduled_cached_reqs  # what makes runner V1 forget the request's row, and with it its last token
    assert resumed.resumed_req_ids == set(blocks)
    assert all(resumed.all_token_ids[r.request_id] == list(r.all_token_ids) for r in requests)
    assert repeating.computed(again) == {}
    repeating.run_to_end()
    assert [request.num_output_tokens for request in requests] == [8, 8, 8]
    assert repeating.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_a_chunk_of_a_prompt_is_computed_again_from_what_was_cached_before_it(repeating: Engine) -> None:
    request = repeating.add(PROMPT)
    repeating.computed(repeating.scheduler.schedule())
    step = repeating.scheduler.schedule()
    assert repeating.lost(step, repeat=True) == {}
    assert repeating.cached_tokens(PROMPT) == CHUNK
    again = repeating.scheduler.schedule()
    assert places(again) == places(step) == {request.request_id: (CHUNK, CHUNK)}
    repeating.computed(again)
    repeating.run_to_end()
    assert request.num_output_tokens == 8


@pytest.mark.parametrize("engine", ["AfdAsyncScheduler"], indirect=True)
@pytest.mark.parametrize("late", ["lost", "computed"])
def test_a_step_on_top_of_the_lost_one_is_worth_nothing_whatever_it_says(repeating: Engine, late: str) -> None:
    first, gone = repeating.add(PROMPT[:40]), repeating.add(PROMPT[CHUNK : CHUNK + 40], max_tokens=2)
    repeating.computed(repeating.scheduler.schedule())
    lost = repeating.scheduler.schedule()
    new = repeating.add(PROMPT[CHUNK + 40 : CHUNK + 90])
    later = repeating.scheduler.schedule()
    assert set(later.num_scheduled_tokens) == {first.request_id, new.request_id}
    assert repeating.lost(lost, repeat=True) == {}
    again = repeating.scheduler.schedule()
    assert places(again) == {first.request_id: (40, 1), gone.request_id: (40, 1), new.request_id: (0, 50)}
    assert (repeating.lost(later, repeat=True) if late == "lost" else repeating.computed(later)) == {}
    assert [r.num_output_tokens for r in (first, gone, new)] == [1, 1, 0]
    assert repeating.computed(again) == {gone.request_id: "length"}
    repeating.run_to_end()
    assert [r.num_output_tokens for r in (first, gone, new)] == [8, 2, 8]
    assert repeating.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize("came", ["with it", "a step later", "back from preemption", "with one that is aborted"])
def test_who_came_into_the_batch_on_blocks_of_the_lost_step_keeps_none_of_them(repeating: Engine, came: str) -> None:
    """vLLM offers a step's blocks to others once it has scheduled the step: here they hold all tokens of B but one."""
    from vllm.v1.request import RequestStatus

    scheduler, prompt = repeating.scheduler, list(range(100, 100 + 2 * BLOCK + 1))
    first = None
    if came == "back from preemption":
        b = repeating.add(prompt[:-1])
        repeating.computed(scheduler.schedule())
        scheduler.running.remove(b)
        scheduler._preempt_request(b, 0.0)
        scheduler.waiting.remove_requests([b])
        scheduler.kv_cache_manager.evict_blocks(set(range(BLOCKS)))
        a = repeating.add(list(b.all_token_ids))
        scheduler.waiting.add_request(b)
    else:
        a = repeating.add(prompt)
        if came == "a step later":
            first = scheduler.schedule()
        b = repeating.add(prompt)
    last = scheduler.schedule()
    garbage = set(ids_of(repeating, a)[:2])
    assert places(last)[b.request_id] == (2 * BLOCK, 1) and garbage <= set(ids_of(repeating, b))
    if came == "with one that is aborted":
        scheduler.finish_requests(a.request_id, RequestStatus.FINISHED_ABORTED)
    assert repeating.lost(first or last, repeat=True) == {}
    again = scheduler.schedule()
    written = {
        block
        for id_, (before, _) in places(again).items()
        for block in ids_of(repeating, scheduler.requests[id_])[before // BLOCK :]
    }
    assert garbage & set(ids_of(repeating, b)) <= written
    if first is not None:
        repeating.lost(last, repeat=True)
    repeating.computed(again)
    repeating.run_to_end()
    assert b.num_output_tokens == 8


def test_who_keeps_its_blocks_keeps_them_over_a_second_loss_too(repeating: Engine) -> None:
    request = repeating.add(PROMPT[: 2 * BLOCK])
    repeating.computed(repeating.scheduler.schedule())
    step, held = repeating.scheduler.schedule(), ids_of(repeating, request)
    for _ in range(3):
        repeating.lost(step, repeat=True)
        again = repeating.scheduler.schedule()
        assert places(again) == places(step) and ids_of(repeating, request) == held
        step = again
    repeating.computed(step)
    repeating.run_to_end()
    assert request.num_output_tokens == 8


def test_an_outage_that_nobody_waited_out_counts_for_no_later_one(
    repeating: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.request import RequestStatus

    from afdpatch.patches import scheduler

    now = [100.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now[0])
    request = repeating.add(PROMPT[:40])
    assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {}
    repeating.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    now[0] += 1e6
    repeating.add(PROMPT[:40])
    assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {}
    repeating.run_to_end()


def test_a_request_that_was_aborted_with_the_step_under_way_stays_away(repeating: Engine) -> None:
    from vllm.v1.request import RequestStatus

    first, second = repeating.add(PROMPT[:40]), repeating.add(PROMPT[CHUNK : CHUNK + 40])
    repeating.computed(repeating.scheduler.schedule())
    step = repeating.scheduler.schedule()
    repeating.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    assert repeating.lost(step, repeat=True) == {}
    third = repeating.scheduler.schedule()
    assert places(third) == {second.request_id: (40, 1)}
    repeating.scheduler.finish_requests(second.request_id, RequestStatus.FINISHED_ABORTED)
    repeating.lost(third, repeat=True)
    assert repeating.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_a_request_that_was_preempted_meanwhile_begins_again_by_itself(repeating: Engine) -> None:
    request = repeating.add(PROMPT[:40])
    repeating.computed(repeating.scheduler.schedule())
    step = repeating.scheduler.schedule()
    repeating.scheduler.running.remove(request)
    repeating.scheduler._preempt_request(request, 0.0)
    assert repeating.lost(step, repeat=True) == {}
    assert places(repeating.scheduler.schedule()) == {request.request_id: (0, 41)}


def test_steps_are_repeated_for_the_recovery_time_and_a_good_one_begins_it_anew(
    repeating: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from afdpatch.patches import scheduler

    clock = [100.0]
    monkeypatch.setattr(repeating.scheduler, "_repeat_s", 60.0)
    monkeypatch.setattr(scheduler, "time", type("time", (), {"monotonic": staticmethod(lambda: clock[0])}))
    assert time.monotonic() != clock[0]
    request = repeating.add(PROMPT[:40])
    for wait in (0, 30, 30):
        clock[0] += wait
        assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {}
    repeating.computed(repeating.scheduler.schedule())
    for wait in (30, 60):
        clock[0] += wait
        assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {}
    clock[0] += 1
    assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {request.request_id: "error"}


@pytest.mark.parametrize(("runner_v2", "ended"), [(False, True), (True, False)])
def test_who_has_a_seed_is_repeated_on_runner_v2_only(repeating: Engine, runner_v2: bool, ended: bool) -> None:
    plain, seeded = repeating.add(PROMPT[:40]), repeating.add(PROMPT[CHUNK : CHUNK + 40], seed=3)
    repeating.computed(repeating.scheduler.schedule())
    repeating.scheduler.use_v2_model_runner = runner_v2
    found = repeating.lost(repeating.scheduler.schedule(), repeat=True)
    assert found == ({seeded.request_id: "error"} if ended else {})
    assert plain.request_id in places(repeating.scheduler.schedule())


def test_log_probabilities_of_a_prompt_come_once_so_its_steps_are_not_repeated(repeating: Engine) -> None:
    request = repeating.add(PROMPT[:40], prompt_logprobs=1)
    assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {request.request_id: "error"}
    request = repeating.add(PROMPT[:40], prompt_logprobs=1)
    repeating.computed(repeating.scheduler.schedule())
    assert repeating.lost(repeating.scheduler.schedule(), repeat=True) == {}


def test_losses_one_after_the_other_that_are_repeated_lose_nothing_of_a_full_memory(repeating: Engine) -> None:
    requests = [repeating.add(list(range(700 * n, 700 * n + 300)), max_tokens=40) for n in range(10)]
    for number in range(600):
        if not repeating.scheduler.has_requests():
            break
        step = repeating.scheduler.schedule()
        assert (repeating.computed(step) if number % 3 else repeating.lost(step, repeat=True)).keys() <= {
            r.request_id for r in requests
        }
    assert [request.num_output_tokens for request in requests] == [40] * 10
    assert repeating.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_a_lost_step_survives_the_way_between_processes() -> None:
    import pickle
    from types import SimpleNamespace

    from afdpatch.patches.scheduler import LostStep

    step: Any = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 1})
    again = pickle.loads(pickle.dumps(LostStep(step, "gone", repeat=True)))
    assert (type(again), again.why, again.repeat, again.req_ids, again.req_id_to_index) == (
        LostStep,
        "gone",
        True,
        ["a", "b"],
        {"a": 0, "b": 1},
    )


class Forward:
    """In the place of vLLM's worker: a forward that does what the test says."""

    outcome: Any = None

    def execute_model(self, scheduler_output: Any) -> Any:
        self.ran = scheduler_output.total_num_scheduled_tokens
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def sample_tokens(self, grammar_output: Any) -> str:
        return "tokens"


@pytest.fixture
def worker() -> Any:
    """The attention role over a made-up worker."""
    from afdpatch.patches.worker import AttentionRole

    made: Any = object.__new__(type("Worker", (AttentionRole, Forward), {}))
    made._losses = 0
    return made


def test_the_worker_answers_a_lost_step_in_both_places_where_vllm_asks_and_no_other_error(
    worker: Any, engine: Engine
) -> None:
    from afdpatch.patches.scheduler import LostStep
    from afdpatch.runtime.connectors.base import NoFfnServer

    engine.add(PROMPT)
    step = engine.scheduler.schedule()
    worker.outcome = NoFfnServer("nobody came")
    lost = worker.execute_model(step)
    assert (type(lost), lost.why, lost.repeat) == (LostStep, "NoFfnServer: nobody came", False)
    assert worker.sample_tokens(None) is lost  # with asynchronous scheduling the step's result comes from here
    worker.outcome = None
    engine.lost(step)
    engine.add(PROMPT)
    step = engine.scheduler.schedule()
    assert worker.execute_model(step) is None
    assert worker.sample_tokens(None) == "tokens"
    worker.outcome = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        worker.execute_model(step)


@pytest.mark.parametrize("engine", ["AfdAsyncScheduler"], indirect=True)
def test_the_worker_does_not_run_a_step_that_was_scheduled_before_the_loss_was_known(
    worker: Any, repeating: Engine
) -> None:
    """Runner V1 would embed the token -1 there: the one that the lost step should have sampled."""
    from afdpatch.patches.scheduler import LostStep
    from afdpatch.runtime.connectors.base import StepLost

    repeating.add(PROMPT[:40])
    lost, on_top = repeating.scheduler.schedule(), repeating.scheduler.schedule()
    worker.outcome = StepLost("gone")
    first = worker.execute_model(lost)
    assert (worker.ran, first.repeat) == (40, True)
    worker.outcome = None
    second = worker.execute_model(on_top)
    assert (worker.ran, type(second), worker.sample_tokens(None)) == (0, LostStep, second)  # who comes and goes only
    assert on_top.total_num_scheduled_tokens == 1
    repeating.scheduler.update_from_output(lost, first)
    again = repeating.scheduler.schedule()
    repeating.scheduler.update_from_output(on_top, second)
    assert worker.execute_model(again) is None
    assert worker.ran == 40


def test_a_step_that_no_scheduler_made_is_run_whatever_was_lost(worker: Any) -> None:
    """vLLM's warm-up makes its own."""
    from types import SimpleNamespace

    worker._losses = 3
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={})) is None
    assert worker.ran == 5


def _hold_all_blocks(engine: Engine) -> list[Any]:
    """Requests that generate and hold every block but one."""
    requests = [engine.add(list(range(700 * n, 700 * n + 9 * BLOCK + 2)), max_tokens=40) for n in range(6)]
    while not all(request.num_output_tokens for request in requests):
        engine.computed(engine.scheduler.schedule())
    return requests


@pytest.mark.parametrize("ahead", ["skipped", "priority", "paused"])
def test_a_request_that_keeps_its_blocks_and_is_not_taken_at_once_gives_them_back(
    repeating: Engine, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that comes before it in the queue, and needs those blocks, would wait for it and it for that one."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    scheduler = repeating.scheduler
    if ahead == "priority":
        monkeypatch.setattr(scheduler, "policy", SchedulingPolicy.PRIORITY)
        for queue in ("waiting", "skipped_waiting"):
            monkeypatch.setattr(scheduler, queue, create_request_queue(SchedulingPolicy.PRIORITY))
    requests = _hold_all_blocks(repeating)
    step = scheduler.schedule()
    other = repeating.add(list(range(9000, 9000 + 20 * BLOCK)))
    if ahead == "priority":
        other.priority = -1
    elif ahead == "skipped":  # where vLLM keeps those whose grammar was compiled late
        scheduler.waiting.remove_request(other)
        scheduler.skipped_waiting.add_request(other)
    assert repeating.lost(step, repeat=True) == {}
    if ahead == "paused":
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        repeating.computed(scheduler.schedule())
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
        scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(400):
        if scheduler.has_requests():
            repeating.computed(scheduler.schedule())
    assert [request.num_output_tokens for request in (*requests, other)] == [40] * 6 + [8]
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
