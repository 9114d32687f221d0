"""What isn't as it should be in a matrix's results."""

import math
from typing import Any

from tests.e2e.sameness import apart, logprob_difference, tokens_of


def judge(stock: dict[str, Any] | None, afd: dict[str, Any] | None, cases: list[str]) -> dict[str, Any]:
    """Which cases have the same tokens and the same log-probabilities, and where zeroed FFNs were not noticed."""
    if stock is None or afd is None:
        return {"missing": [name for name, seen in (("stock", stock), ("afd", afd)) if seen is None]}
    outputs = {"stock": stock["cases"], "afd": afd["cases"], "afd, zeroed": afd.get("zero", dict.fromkeys(cases))}
    if missing := [f"{case} of {name}" for name, seen in outputs.items() for case in cases if case not in seen]:
        return {"missing": missing}
    same = {case: tokens_of(stock["cases"][case]) == tokens_of(afd["cases"][case]) for case in cases}
    differences = {}
    for case in cases:
        try:
            differences[case] = logprob_difference(stock["cases"][case], afd["cases"][case])
        except (ValueError, KeyError) as error:
            differences[case] = f"{type(error).__name__}: {error}"
    found: dict[str, Any] = {
        "equal": sum(same.values()),
        "of": len(cases),
        "tokens differ": [case for case in cases if not same[case]],
        "logprobs differ": {case: value for case, value in differences.items() if value != 0.0},
    }
    if empty := [case for case in cases if not (_says(stock["cases"][case]) and _says(afd["cases"][case]))]:
        found["nothing said"] = empty
    if "page" in stock:
        found["stock hops"] = stock["page"].get("hops")
    if "zero" in afd:
        found["zero unnoticed"] = [c for c in cases if tokens_of(afd["zero"][c]) == tokens_of(stock["cases"][c])]
    page = afd.get("page", {})
    found["hops"], found["steps"] = page.get("hops"), afd.get("all_steps", afd.get("steps"))
    found["stock steps"] = stock.get("steps")
    return found


PADDING_BOUND = 0.25
"""The most by which a log-probability may differ between two paddings of a batch (eager and a graph's rows), or between
hops computed alone and together, as long as the tokens are the same: bfloat16, small trained models."""


def across_padding(stock: dict[str, Any], afd: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """How far AFD with one padding is from stock vLLM with another: the largest difference of a log-probability while
    the tokens are the same, how many tokens these are, and of how many.
    """
    worst, same, every = 0.0, 0, 0
    for case in cases:
        for left, right in zip(_choices(stock["cases"][case]), _choices(afd["cases"][case]), strict=True):
            every += len(left["tokens"])
            for index, (one, other) in enumerate(zip(left["tokens"], right["tokens"], strict=False)):
                if one != other:
                    break
                same += 1
                a, b = left["logprobs"][index], right["logprobs"][index]
                worst = max([worst, *(apart(a[token], b[token]) for token in a.keys() & b.keys())])
    return {"largest": worst, "same tokens": same, "tokens": every}


ROUNDING_BOUND = 0.01
"""The most by which the held-out perplexity may change when hidden states travel in 8 bits."""


def rounded(stock: dict[str, Any], afd: dict[str, Any], case: str) -> dict[str, Any]:
    """What a pair whose hidden states travel rounded makes of a case of held-out text, beside stock vLLM."""
    plain, changed = stock["cases"][case], afd["cases"][case]
    before, after = (math.exp(-seen["sum"] / seen["count"]) for seen in (plain, changed))
    distances = sorted(apart(a, b) for a, b in zip(plain["values"], changed["values"], strict=True))
    return {
        "tokens": plain["count"],
        "perplexity": before,
        "rounded": after,
        "rise": after / before - 1,
        "logprobs apart, median": distances[len(distances) // 2],
        "logprobs apart, largest": distances[-1],
    }


def _choices(case: Any) -> list[dict[str, Any]]:
    if isinstance(case, list):
        return [choice for part in case for choice in _choices(part)]
    return list(case["choices"])


def _says(case: Any) -> bool:
    """Whether each output of a case has tokens, and each token its log-probabilities."""
    choices = _choices(case)
    return bool(choices) and all(one["tokens"] and len(one["logprobs"]) == len(one["tokens"]) for one in choices)


def faults(results: dict[str, Any]) -> list[str]:
    """What in a matrix's results isn't as it should be; one line each."""
    found = [] if results else ["nothing was run"]
    for name, result in results.items():
        if name.endswith(":error"):
            found.append(f"{name}: {result}")
        elif name.endswith(":exit"):
            if result != 0:
                found.append(f"{name}: expected 0, found {result}")
        elif not isinstance(result, dict):
            found.append(f"{name}: {result}")
        elif name == "stale":
            found += _stale(result)
        elif "missing" in result:
            found.append(f"{name}: nothing from {result['missing']}")
        elif "equal" in result:
            if not _is_equal(result):
                found.append(f"{name}: {result}")
        elif "largest" in result:
            same_enough = 0 < 0.9 * result["tokens"] <= result["same tokens"]
            if not (result["largest"] <= PADDING_BOUND and same_enough):
                found.append(
                    f"{name}: expected at most {PADDING_BOUND} and nine of ten tokens the same, found {result}"
                )
        elif "merged" in result:
            if not result["merged"]:
                found.append(f"{name}: expected hops that were computed together, found {result}")
        elif "rise" in result:
            # Rounding that changed nothing was no rounding.
            if not (result["logprobs apart, largest"] > 0 and abs(result["rise"]) <= ROUNDING_BOUND):
                found.append(
                    f"{name}: expected some change and at most {ROUNDING_BOUND:.0%} of perplexity, found {result}"
                )
        elif "ffn noticed" in result:
            if not result["ffn noticed"]:
                found.append(f"{name}: the FFN server didn't notice")
        elif "errors" not in result or not _went_on(result):
            found.append(f"{name}: {result}")
    return found


def _is_equal(result: dict[str, Any]) -> bool:
    """Whether all cases of a pair were the same, and it was one: stock vLLM beside itself is the same as well."""
    hops = result.get("hops")
    return bool(
        0 < result["equal"] == result["of"]
        and not (result["logprobs differ"] or result.get("zero unnoticed") or result.get("nothing said"))
        and hops
        and result.get("ffn hops", hops) == hops
        and "stock hops" not in result
    )


def _went_on(result: dict[str, Any]) -> bool:
    """Whether a batch that lost a step was the same nevertheless."""
    return bool(
        not result["errors"]
        and result["lost_steps"]
        and result["same"]
        and result["logprobs differ"] <= PADDING_BOUND
        and result["same again"]
    )


def _stale(starts: dict[str, Any]) -> list[str]:
    """What is wrong with five starts on one compile cache, of the manifests X and Y."""
    if starts.keys() != {"X cold", "X warm", "X keyless", "Y edited", "Y keyless-edited"}:
        return [f"stale: expected five starts, found {starts}"]
    folders = {name: set(start["folders"]) for name, start in starts.items()}
    tokens = [start["tokens"] for start in starts.values()]
    loaded = {name for name, start in starts.items() if start["loaded"]}
    checks = {
        "the same tokens": tokens[0] and tokens.count(tokens[0]) == len(tokens),
        "X's cache is loaded by X": "X warm" in loaded and folders["X warm"] == folders["X cold"] != set(),
        "X's cache is not loaded by Y": "Y edited" not in loaded and not folders["Y edited"] & folders["X cold"],
        "with a constant key it would be": "Y keyless-edited" in loaded
        and folders["Y keyless-edited"] & folders["X keyless"],
    }
    return [f"stale: expected {what}, found {starts}" for what, well in checks.items() if not well]
