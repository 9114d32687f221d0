"""One engine, one battery of cases: `python -m tests.e2e.driver SPEC OUT`, both JSON files.

It runs vLLM in this process (no EngineCore process), so that the composition of every batch is the same in every run:
a stock engine, or an attention role that is connected to a real FFN server.
What it saw is written to OUT; tests compare files.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.sameness import logprob_difference, tokens_of

if __name__ == "__main__":  # the servers of tests that import this have their processes as users have them
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

LONG = (
    "The :func:`open` function returns a file object. The mode argument is optional; 'r' will be assumed "
    "if it is omitted. Normally, files are opened in text mode, that means, you read and write strings "
    "from and to the file, which are encoded in a specific encoding. If encoding is not specified, the "
    "default is platform dependent. Appending a 'b' to the mode opens the file in binary mode. Binary "
    "mode data is read and written as bytes objects. "
)
PROMPTS = [
    "The :func:`open` function returns",
    "If the *key* is not found,",
    "class Thread:\n    def",
    "Changed in version 3.8:",
    "Raises a :exc:`ValueError` if",
    "A simple example of the use of the module is the following, which prints the names of all files in a directory:",
    "The",
    ".. method:: list.append(x)\n\n   Add an item to the end of the list.",
    "import asyncio\n\nasync def main():",
    "See also the documentation of",
    "This is",
    "Note that the",
    "return",
    LONG[:200],
    LONG[:90],
    "Deprecated since version",
]
METRICS: dict[str, Any] = {}


def main() -> None:
    """Run the spec's cases."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("dump_after_s"):
        faulthandler.dump_traceback_later(spec["dump_after_s"], repeat=True)
    if spec.get("afd") or spec.get("arm"):
        import afdpatch  # noqa: F401
    from vllm import LLM

    from tests.e2e.recorder import PARAMETERS, record_parameters

    record_parameters()
    if spec.get("constant_key"):
        from afdpatch.patches.settings import AfdSettings

        AfdSettings.compute_hash = lambda self: spec["constant_key"]  # what the compile key would be without ours
    if spec.get("local_op"):
        call_ffns_through_the_op(spec["local_op"])
    if spec.get("cut"):
        cut_at_the_op(spec["engine"]["compilation_config"])
    additional = {"additional_config": {"afd": spec["afd"]}} if spec.get("afd") else {}
    llm = LLM(model=spec["model"], **spec["engine"], **additional)
    runner = Runner(llm)
    out: dict[str, Any] = {"cases": {name: runner.run(name) for name in spec["cases"]}}
    out["steps"] = runner.steps
    if spec.get("zero_url"):
        wait_for(spec["zero_url"])
        rpc(spec["zero_url"], "zero_ffn", True)
        out["zero"] = {name: runner.run(name) for name in spec["cases"]}
        rpc(spec["zero_url"], "zero_ffn", False)
        out["again"] = {name: runner.run(name) for name in spec["cases"][:1]}
        out["all_steps"] = runner.steps
    out["parameters"] = PARAMETERS
    out["model"] = spec["model"]
    if spec.get("afd"):
        from dataclasses import asdict

        from afdpatch.runtime.status import StatusPage

        page = StatusPage.from_environment()
        assert page is not None
        # Counters are named by an enum's members there, which JSON doesn't take as keys.
        out["page"] = {key: value for key, value in asdict(page.snapshot()).items() if not isinstance(value, dict)}
    Path(sys.argv[2]).write_text(json.dumps(out))


def wait_for(url: str, seconds: float = 120) -> None:
    """Wait until a server answers /health with 200: an FFN server serves hops before it listens for HTTP."""
    from afdpatch.cli.servers import get_status

    host, port = url.removeprefix("http://").split(":")
    end, tick = time.monotonic() + seconds, threading.Event()
    while (status := get_status(host, int(port), "/health")) != 200:
        if time.monotonic() > end:
            raise TimeoutError(f"expected /health of {url} to be 200 within {seconds:g} s, found {status}")
        tick.wait(0.1)


def rpc(url: str, method: str, *args: Any) -> Any:
    """Call a worker method of a server in development mode."""
    body = json.dumps({"method": method, "args": args}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or b"null")


class Runner:
    """Runs named cases on one engine and counts its forwards."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.steps = 0
        self.serial = 0
        worker = self.engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.model = worker.model_runner.get_model()
        self.model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def run(self, name: str) -> Any:
        """One case, from an empty prefix cache."""
        print(f"CASE {name}", flush=True)
        self.llm.reset_prefix_cache()
        kind, _, argument = name.partition(":")
        return getattr(self, f"case_{kind}")(*([argument] if argument else []))

    def generate(self, prompts: list[Any], **sampling: Any) -> list[Any]:
        """Greedy unless told otherwise, with the five best log-probabilities of each token."""
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True} | sampling)
        return [show(output) for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def case_batch(self, size: str) -> Any:
        """Prefill and decode of a batch of different lengths."""
        return self.generate(PROMPTS[: int(size)])

    def case_chunked(self) -> Any:
        """A prompt longer than one step may be, beside a short one."""
        return self.generate([LONG * 2, PROMPTS[0]])

    def case_prefix(self) -> Any:
        """The same prefix twice, with the prefix cache on; the second time it must be hit."""
        return [self.generate([LONG + PROMPTS[0]]), self.generate([LONG + PROMPTS[1]])]

    def case_seeded(self) -> Any:
        """Sampling with a seed, several choices of a prompt."""
        return self.generate(PROMPTS[:3], temperature=0.8, top_p=0.95, seed=1234, n=3)

    def case_stop(self) -> Any:
        """A stop string in the middle of what would be said."""
        return self.generate(PROMPTS[:2], stop=["object", "er", "on", "in"], max_tokens=32)

    def case_forever(self) -> Any:
        """A batch again and again, until somebody ends it."""
        while True:
            self.generate(PROMPTS[:5], max_tokens=200)

    def case_totals(self) -> Any:
        """A prefill of as many tokens as a decode just before it had requests, and a prompt of one token."""
        decoded = self.generate(PROMPTS[:8])
        prompts = [{"prompt_token_ids": list(range(100, 100 + length))} for length in (8, 1, 16)]
        return [decoded, *(self.generate([prompt]) for prompt in prompts)]

    def case_survive(self) -> Any:
        """The same batch again and again until its FFN server was lost and another came, and once more."""
        from afdpatch.runtime.events import Event
        from afdpatch.runtime.status import StatusPage

        page = StatusPage.from_environment()
        assert page is not None
        scheduler = self.engine.engine_core.engine_core.scheduler

        def batch() -> Any:
            return self.generate(PROMPTS[:5], max_tokens=200)

        batch()
        first = batch()  # from the prefix cache, as all that follow
        print("CASE generating", flush=True)
        began = time.monotonic()
        while time.monotonic() - began < 150:
            at, losses = time.monotonic(), scheduler._losses
            outputs = batch()
            if not page.snapshot().events[Event.PEER_LOST]:
                continue
            again = batch()
            reasons = [choice["finish"][0] for output in outputs for choice in output["choices"]]
            return {
                "took_s": time.monotonic() - at,
                "lost_steps": scheduler._losses - losses,
                "errors": sum(reason != "length" for reason in reasons),
                "same": tokens_of(outputs) == tokens_of(first),
                "logprobs differ": logprob_difference(outputs, first),
                "same again": again == first,
            }
        return {"errors": "no FFN server was lost"}

    def case_abort(self) -> Any:
        """One of two requests is aborted in mid-stream; the other goes on."""
        from vllm import SamplingParams

        self.serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, ignore_eos=True)
        names = [f"abort-{self.serial}-{index}" for index in range(2)]
        self.engine.reset_prefix_cache()
        internal = [self.engine.add_request(name, prompt, params) for name, prompt in zip(names, PROMPTS, strict=False)]
        done: list[Any] = []
        for step in range(200):
            if step == 6:
                self.engine.abort_request([internal[0]], internal=True)
            if not self.engine.has_unfinished_requests():
                break
            done += [output for output in self.engine.step() if output.finished]
        return [show(output) for output in done]

    def case_perplexity(self, windows: str) -> Any:
        """Sum of log-probabilities of the held-out text in windows of 512 tokens, and how many."""
        from vllm import SamplingParams

        text = (Path(__file__).parent.parent / "models" / "held-out.txt").read_text()
        tokens = self.llm.get_tokenizer().encode(text)
        parts = [tokens[start : start + 512] for start in range(0, 512 * int(windows), 512)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": part} for part in parts], params, use_tqdm=False)
        values = [
            logprobs[token].logprob
            for output in outputs
            for token, logprobs in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return {"sum": sum(values), "count": len(values), "values": values}


def call_ffns_through_the_op(architecture: str) -> None:
    """In a stock model, call each layer's own FFN through the hop's op: what a compiled AFD model is held against."""
    from torch import nn
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from afdpatch.patches.model import ffns
    from afdpatch.patches.models import tables

    import torch  # isort: skip

    row = tables().models[architecture]
    original = BaseModelLoader.load_model

    class LocalFFN(nn.Module):
        def __init__(self, name: str, ffn: nn.Module) -> None:
            super().__init__()
            self.name = name
            self.ffn = ffn

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
            torch.ops.afdpatch.ffn(hidden_states, output, self.name)
            return output

        def ffn_into(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
            output.copy_(self.ffn(hidden_states))

        def pieces_captured(self, rows: int) -> None:
            pass

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        model = original(self, vllm_config, model_config, prefix)
        for name, _, decoder, ffn in list(ffns(model, row)):
            local = LocalFFN(name, ffn)
            setattr(decoder, row.ffn, local)
            vllm_config.compilation_config.static_forward_context[name] = local
        return model

    BaseModelLoader.load_model = load_model


def cut_at_the_op(compilation: dict[str, Any]) -> None:
    """In a stock model, cut piecewise graphs at the hop's op too, so that its pieces are those of an attention server.

    As there, the op does nothing while pieces are captured.
    """
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CompilationConfig
    from vllm.forward_context import get_forward_context, is_forward_context_available

    from afdpatch.patches.settings import CAPTURES, HOP_OP

    updates = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
    compilation["splitting_ops"] = [*CompilationConfig._attention_ops, *updates, HOP_OP]
    original = CUDAGraphWrapper.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_forward_context_available():
            context = get_forward_context()
            piece = context.cudagraph_runtime_mode == self.runtime_mode and self.runtime_mode.name == "PIECEWISE"
            if piece and context.batch_descriptor not in self.concrete_cudagraph_entries:
                context.additional_kwargs[CAPTURES] = True
        return original(self, *args, **kwargs)

    CUDAGraphWrapper.__call__ = __call__


def show(output: Any) -> dict[str, Any]:
    """Tokens, text, log-probabilities and the like of a request's output."""
    return {
        "cached": output.num_cached_tokens,
        "prompt": len(output.prompt_token_ids),
        "choices": [
            {
                "tokens": list(choice.token_ids),
                "text": choice.text,
                "finish": [choice.finish_reason, str(choice.stop_reason)],
                "logprobs": [
                    {str(token): value.logprob for token, value in sorted(step.items())}
                    for step in choice.logprobs or []
                ],
            }
            for choice in output.outputs
        ],
    }


if __name__ == "__main__":
    main()
