"""What is the same in two drivers' results; for CPU and GPU alike."""

import math
from typing import Any


def tokens_of(case: Any) -> Any:
    """The tokens in a case's outputs, without what stands beside them."""
    if isinstance(case, list):
        return [tokens_of(part) for part in case]
    return [choice["tokens"] for choice in case["choices"]]


def logprob_difference(left: Any, right: Any) -> float:
    """Largest difference of two cases' log-probabilities; infinite where the candidates differ, or one is no number."""
    if isinstance(left, list):
        return max((logprob_difference(a, b) for a, b in zip(left, right, strict=True)), default=0.0)
    worst = 0.0
    for a, b in zip(left["choices"], right["choices"], strict=True):
        for step, other in zip(a["logprobs"], b["logprobs"], strict=True):
            if step.keys() != other.keys():
                return math.inf
            worst = max(worst, *(apart(step[token], other[token]) for token in step))
    return worst


def apart(one: float, other: float) -> float:
    """How far two log-probabilities are from each other; infinitely where one is NaN, which `max` would pass over."""
    distance = abs(one - other)
    return math.inf if math.isnan(distance) else distance
