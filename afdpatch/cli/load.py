"""A bounded load on one completions API, and what it measured."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from afdpatch.cli import client

TEXT = """
The open function returns a file object whose type depends on the mode. Changed in version 3.8: the method accepts
keyword arguments, and raises an exception of type ValueError if the argument is not a dictionary. This module provides
a simple interface to the operating system: see the documentation of the class for a list of its methods.
"""


def make_prompts(count: int, words: int) -> list[str]:
    """`count` different prompts of `words` words: no two have a beginning in common."""
    source = TEXT.split()
    return [
        " ".join([f"{number + 1}."] + [source[(number * 7 + i) % len(source)] for i in range(words)])
        for number in range(count)
    ]


@dataclass
class Measured:
    """One round on one side. Times in seconds; one entry a request in `ttft` and `tpot`."""

    side: str
    seconds: float = 0.0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Output tokens per second of the whole round."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "seconds": self.seconds,
            "output_tokens": self.tokens,
            "output_tokens_per_s": self.rate,
            "ttft_s": self.ttft,
            "tpot_s": self.tpot,
            "cpu_s": self.cpu_seconds,
            "cpu_s_of_the_idle_side": self.idle_cpu_seconds,
            "errors": self.errors,
        }


def run_round(side: str, url: str, model: str, prompts: Sequence[str], tokens: int, concurrency: int) -> Measured:
    """Ask all prompts, `concurrency` at a time, each for exactly `tokens` tokens; returns when all are answered.

    TTFT is the time to the first token; TPOT that from the first to the last, divided by the tokens after the first.
    """
    measured = Measured(side)
    todo = list(reversed(prompts))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                prompt = todo.pop()
            try:
                answer = client.Completion(prompt)
                for answer in client.stream(  # noqa: B007 - the last one counts
                    url, model, prompt, tokens, logprobs=None, ignore_eos=True, timeout=300
                ):
                    pass
                if answer.finish != "length" or answer.first is None:
                    raise ValueError(f"expected {tokens} tokens, found an answer that ended with {answer.finish!r}")
            except (OSError, ValueError, LookupError) as error:
                with lock:
                    measured.errors.append(str(error))
                continue
            with lock:
                measured.tokens += tokens
                measured.ttft.append(answer.first)
                if tokens > 1:
                    measured.tpot.append((answer.last - answer.first) / (tokens - 1))
                measured.texts[prompt] = answer.text

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(prompts)))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured.seconds = time.perf_counter() - begin
    return measured


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation; nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(rounds: Sequence[Measured], side: str) -> dict[str, Any]:
    """A side's rounds in a few numbers: rates by round, latencies over all its requests, in milliseconds."""
    own = [measured for measured in rounds if measured.side == side]
    rates = [measured.rate for measured in own]
    ttft = [1e3 * value for measured in own for value in measured.ttft]
    tpot = [1e3 * value for measured in own for value in measured.tpot]
    return {
        "output_tokens_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "tpot_ms": {"p50": percentile(tpot, 50), "p99": percentile(tpot, 99)},
        "ttft_ms": {"p50": percentile(ttft, 50), "p99": percentile(ttft, 99)},
        "cores_used": sum(m.cpu_seconds for m in own) / sum(m.seconds for m in own),
        "cores_used_by_the_idle_side": sum(m.idle_cpu_seconds for m in own) / sum(m.seconds for m in own),
        "requests": len(ttft),
        "errors": sum(len(measured.errors) for measured in own),
    }


def ratios(rounds: Sequence[Measured]) -> list[float]:
    """AFD's rate over stock's, for each pair of rounds that followed each other."""
    stock = [measured.rate for measured in rounds if measured.side == "stock"]
    afd = [measured.rate for measured in rounds if measured.side == "afd"]
    return [ours / theirs for theirs, ours in zip(stock, afd, strict=False) if theirs]


def equal_answers(rounds: Sequence[Measured]) -> tuple[int, int]:
    """Prompts that both sides answered with the same text in every round, of those that both answered."""
    by_side: dict[str, dict[str, set[str]]] = {"stock": {}, "afd": {}}
    for measured in rounds:
        for prompt, text in measured.texts.items():
            by_side[measured.side].setdefault(prompt, set()).add(text)
    both = by_side["stock"].keys() & by_side["afd"].keys()
    return sum(by_side["stock"][p] == by_side["afd"][p] and len(by_side["afd"][p]) == 1 for p in both), len(both)
