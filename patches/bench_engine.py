"""An engine that measures its time per output token: `python -m afdpatch.patches.bench_engine DESCRIPTOR SPEC`.

`afdpatch bench tpot` starts it and speaks with it over the socket DESCRIPTOR, a line of JSON each way: it says that it
has started, is told a batch, and answers with the times of its steps. It ends when the other end is closed.
"""

import json
import random
import socket
import sys
import time
from typing import Any

VOCABULARY = range(100, 1000)
"""Where the random prompts' tokens come from."""


def main() -> None:
    """Start the engine of the spec (`model`, `engine`: vLLM's arguments, `afd`: the role or None), and measure."""
    spec = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rw") as line:
        if spec["afd"]:
            import afdpatch  # noqa: F401
        from vllm import LLM

        began = time.perf_counter()
        arguments: dict[str, Any] = spec["engine"]
        if spec["afd"]:
            arguments["additional_config"] = {"afd": spec["afd"]}
        engine = LLM(model=spec["model"], **arguments).llm_engine
        _say(line, {"vllm": sys.modules["vllm"].__version__, "start_s": time.perf_counter() - began})
        for order in iter(line.readline, ""):
            first, steps = decode(engine, **json.loads(order))
            _say(line, {"first_ms": first, "steps_ms": steps})


def _say(line: Any, message: dict[str, Any]) -> None:
    line.write(json.dumps(message) + "\n")
    line.flush()


def decode(engine: Any, batch: int, context: int, tokens: int, number: int) -> tuple[float, list[float]]:
    """Decode a batch.

    Args:
        engine: vLLM's LLMEngine, idle.
        batch: how many requests.
        context: tokens of each prompt, random and the same for the same `number`.
        tokens: that each request generates.
        number: of the measurement.

    Returns:
        Milliseconds until each request had its first token, and those between two steps that gave each one a token.
    """
    from vllm import SamplingParams

    chance = random.Random(number)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for index in range(batch):
        prompt = {"prompt_token_ids": chance.choices(VOCABULARY, k=context)}
        engine.add_request(f"{number}-{batch}-{index}", prompt, params)
    found: list[float] = []
    first = last = 0.0
    have: set[str] = set()
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        have.update(output.request_id for output in outputs)
        if not first and len(have) == batch:
            first = 1000 * (now - began)
        if len(outputs) == batch and last:
            found.append(1000 * (now - last))
        last = now if len(outputs) == batch else 0.0
    return first, found


if __name__ == "__main__":
    main()
