"""The judge finds what isn't as it should be; no GPU is needed."""

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.judge import across_padding, faults, judge, rounded
from tests.gpu.matrix import Matrix

EQUAL = {"equal": 2, "of": 2, "logprobs differ": {}, "zero unnoticed": [], "hops": 8}
SURVIVED = {"lost_steps": 1, "errors": 0, "same": True, "logprobs differ": 0.0, "same again": True}


def case(*tokens: int, best: float = -1.0) -> dict[str, Any]:
    """A request's output: its tokens, each the best of two."""
    return {"choices": [{"tokens": list(tokens), "logprobs": [{str(t): best, "x": -5.0} for t in tokens]}]}


def test_paddings_are_compared_as_long_as_the_tokens_are_the_same() -> None:
    stock = {"cases": {"a": case(1, 2, 3, 4), "b": [case(7)]}}
    afd = {"cases": {"a": case(1, 2, 9, 4, best=-1.125), "b": [case(7, best=-1.5)]}}
    assert across_padding(stock, afd, ["a"]) == {"largest": 0.125, "same tokens": 2, "tokens": 4}
    found = across_padding(stock, afd, ["a", "b"])
    assert found == {"largest": 0.5, "same tokens": 3, "tokens": 5}


def pair(afd: Any, stock: Any = None, **more: Any) -> list[str]:
    """What is found in a pair of results of one case, of which the pair's has hopped unless told otherwise."""
    seen = {"cases": {"a": afd}, "page": {"hops": 8}} | more
    return faults({"name": judge({"cases": {"a": case(1, 2) if stock is None else stock}}, seen, ["a"])})


def test_what_is_equal_is_equal() -> None:
    assert pair(case(1, 2)) == pair(case(1, 2), zero={"a": case(3, 4)}) == []
    assert pair([case(1), case(2)], [case(1), case(2)]) == []


@pytest.mark.parametrize(
    ("afd", "stock"),
    [
        (case(1, 3), case(1, 2)),
        (case(1), case(1, 2)),
        (case(1, 2, best=-1.5), case(1, 2)),
        (case(1, 2, best=math.nan), case(1, 2)),
        (case(1, 2), case(1, 2, best=math.nan)),
        (case(1, 2, best=math.nan), case(1, 2, best=math.nan)),
        (case(), case()),
        ({"choices": []}, {"choices": []}),
        ([], []),
        ([case(1), case()], [case(1), case()]),
        ({"choices": [{"tokens": [1, 2], "logprobs": []}]}, {"choices": [{"tokens": [1, 2], "logprobs": []}]}),
    ],
)
def test_what_is_not_equal_or_says_nothing_is_found(afd: Any, stock: Any) -> None:
    assert pair(afd, stock) != []


def test_stock_vllm_beside_itself_is_no_pair() -> None:
    assert pair(case(1, 2), page={}) != []
    assert pair(case(1, 2), page={"hops": 0}) != []
    hopped = {"cases": {"a": case(1, 2)}, "page": {"hops": 8}}
    assert faults({"name": judge(hopped, hopped, ["a"])}) != []
    assert pair(case(1, 2), zero={"a": case(1, 2)}) != []


def test_no_cases_are_not_equal() -> None:
    assert faults({"name": judge({"cases": {}}, {"cases": {}, "page": {"hops": 8}}, [])}) != []
    assert faults({"name": across_padding({"cases": {}}, {"cases": {}}, [])}) != []
    assert faults({}) != []


def test_a_case_that_one_lacks_is_named() -> None:
    both, one = {"cases": {"a": case(1), "b": case(2)}}, {"cases": {"a": case(1)}}
    for stock, afd in ((one, both), (both, one), (both, both | {"zero": {"a": case(3)}})):
        assert "b" in str(faults({"name": judge(stock, afd | {"page": {"hops": 8}}, ["a", "b"])}))


def test_a_number_that_is_none_is_within_no_bound() -> None:
    stock, afd = {"cases": {"a": case(1, 2)}}, {"cases": {"a": case(1, 2, best=math.nan)}}
    assert faults({"name": across_padding(stock, afd, ["a"])}) != []
    before, after = (
        {"cases": {"p": {"sum": sum(v), "count": 3, "values": v}}} for v in ([-2.0] * 3, [-2.0, math.nan, -1])
    )
    assert faults({"name": rounded(before, after, "p")}) != []


def start(folder: str, loaded: bool, *tokens: int) -> dict[str, Any]:
    """One start on a compile cache."""
    return {"folders": [folder], "loaded": loaded, "tokens": [list(tokens)] if tokens else None}


STARTS = {
    "X cold": start("x", False, 1),
    "X warm": start("x", True, 1),
    "X keyless": start("k", False, 1),
    "Y edited": start("y", False, 1),
    "Y keyless-edited": start("k", True, 1),
}


@pytest.mark.parametrize(
    ("starts", "well"),
    [
        (STARTS, True),
        (STARTS | {"X warm": start("x", False, 1)}, False),
        (STARTS | {"Y edited": start("x", True, 1)}, False),
        (STARTS | {"Y keyless-edited": start("y", False, 1)}, False),
        (STARTS | {"X warm": start("x", True, 2)}, False),
        (dict.fromkeys(STARTS, start("x", True)), False),
        ({name: STARTS[name] for name in [*STARTS][:3]}, False),
        ({}, False),
    ],
)
def test_a_stale_cache_that_is_served_or_starts_that_are_missing_are_found(starts: Any, well: bool) -> None:
    assert (faults({"stale": starts}) == []) is well


def test_a_task_that_dies_or_does_not_end_is_found(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path, 0.5)
    tasks = [
        matrix.task("raises", lambda: 1 / 0),
        matrix.task("leaves", sys.exit),
        matrix.task("hangs", threading.Event().wait),
        matrix.task("works", lambda: matrix.results.update(work={"ffn noticed": True})),
    ]
    matrix.run(tasks)
    assert {fault.partition(":")[0] for fault in faults(matrix.results)} == {"raises", "leaves", "hangs"}


@pytest.mark.parametrize("kill", [Matrix.kill_attention, Matrix.survive])
def test_a_loss_for_which_no_time_was_left_is_found(tmp_path: Path, kill: Any) -> None:
    matrix = Matrix(tmp_path, 0)
    kill(matrix, "chain", tmp_path, {}, "eager", None, "1", *range(kill.__code__.co_argcount - 7))
    assert len(faults(matrix.results)) == 1


@pytest.mark.parametrize(
    ("after", "rise", "well"),
    [
        (-2.0, 0.0, False),
        (-2.009, 0.009, True),
        (-2.02, 0.0202, False),
        (-1.995, -0.005, True),
        (0.0, -0.8647, False),  # whoever is sure of every token has computed nothing
    ],
)
def test_rounding_may_cost_a_hundredth_and_must_show(after: float, rise: float, well: bool) -> None:
    stock, afd = ({"cases": {"p": {"sum": 2 * v, "count": 2, "values": [v, v]}}} for v in (-2.0, after))
    found = rounded(stock, afd, "p")
    assert found["rise"] == pytest.approx(rise, abs=1e-4)
    assert (faults({"m-fp8": found}) == []) is well


@pytest.mark.parametrize(
    ("result", "well"),
    [
        ({"largest": 0.1, "same tokens": 10, "tokens": 10}, True),
        ({"largest": 0.3, "same tokens": 10, "tokens": 10}, False),
        ({"largest": 0.1, "same tokens": 8, "tokens": 10}, False),
        ({"merged": 4.0, "of": 8.0}, True),
        ({"merged": 0.0, "of": 8.0}, False),
        (EQUAL, True),
        (EQUAL | {"equal": 1}, False),
        (EQUAL | {"logprobs differ": {"a": 0.1}}, False),
        (EQUAL | {"zero unnoticed": ["a"]}, False),
        (EQUAL | {"hops": None}, False),
        (EQUAL | {"ffn hops": 8.0}, True),
        (EQUAL | {"ffn hops": 4.0}, False),
        ({"missing": ["stock"]}, False),
        ({"ffn noticed": True, "s": 0.2}, True),
        ({"ffn noticed": False}, False),
        (SURVIVED, True),
        (SURVIVED | {"same": False}, False),
        (SURVIVED | {"same again": False}, False),
        (SURVIVED | {"errors": 1}, False),
        (SURVIVED | {"lost_steps": 0}, False),
        (SURVIVED | {"logprobs differ": 0.5}, False),
        (SURVIVED | {"logprobs differ": math.nan}, False),
        ({"errors": "no FFN server was lost"}, False),
        ({}, False),
        ({"hops": 8}, False),
        (None, False),
    ],
)
def test_each_kind_of_result_has_its_bound(result: Any, well: bool) -> None:
    assert (faults({"name": result}) == []) is well
    assert faults({"name:exit": 0}) == []
    assert all(faults({"name:exit": code}) for code in (1, -9, None, "killed at its deadline"))
