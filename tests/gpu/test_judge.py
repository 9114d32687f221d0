"""The judge finds what isn't as it should be; no GPU is needed."""

from typing import Any

import pytest

from tests.gpu.judge import across_padding, faults, rounded


def case(*tokens: int, best: float = -1.0) -> dict[str, Any]:
    """A request's output: its tokens, each the best of two."""
    return {"choices": [{"tokens": list(tokens), "logprobs": [{str(t): best, "x": -5.0} for t in tokens]}]}


def test_paddings_are_compared_as_long_as_the_tokens_are_the_same() -> None:
    stock = {"cases": {"a": case(1, 2, 3, 4), "b": [case(7)]}}
    afd = {"cases": {"a": case(1, 2, 9, 4, best=-1.125), "b": [case(7, best=-1.5)]}}
    assert across_padding(stock, afd, ["a"]) == {"largest": 0.125, "same tokens": 2, "tokens": 4}
    found = across_padding(stock, afd, ["a", "b"])
    assert found == {"largest": 0.5, "same tokens": 3, "tokens": 5}


@pytest.mark.parametrize(
    ("after", "rise", "well"), [(-2.0, 0.0, False), (-2.009, 0.009, True), (-2.02, 0.0202, False), (-1.99, -0.01, True)]
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
        ({"equal": 2, "of": 2, "logprobs differ": {}, "zero unnoticed": []}, True),
        ({"equal": 1, "of": 2, "logprobs differ": {}, "zero unnoticed": []}, False),
        ({"equal": 2, "of": 2, "logprobs differ": {"a": 0.1}, "zero unnoticed": []}, False),
        ({"equal": 2, "of": 2, "logprobs differ": {}, "zero unnoticed": ["a"]}, False),
        ({"missing": ["stock"]}, False),
        ({"ffn noticed": False}, False),
        ({"errors": 0, "same": True, "same again": True}, True),
        ({"errors": 0, "same": False, "same again": True}, False),
        (None, False),
    ],
)
def test_each_kind_of_result_has_its_bound(result: Any, well: bool) -> None:
    assert (faults({"name": result}) == []) is well
    assert faults({"name:exit": 0}) == [] != faults({"name:exit": "killed at its deadline"})
