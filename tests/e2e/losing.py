"""Steps that are lost and repeated, on one stock engine with our scheduler: `python -m tests.e2e.losing SPEC OUT`.

The engine's worker is the attention role's of a GPU without an FFN server: its route is made up. A step is lost as over
`ipc`: either its forward ends with an error (`raised`), or it runs to its end on garbage, and the loss shows when its
tokens are looked at (`late`). Both leave garbage in the KV cache. Works with any runner, on CPU and GPU.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if __name__ == "__main__":  # the servers of tests that import this have their processes as users have them
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import afdpatch  # noqa: F401
from afdpatch.patches.worker_gpu import AttentionWorker
from afdpatch.runtime.connectors.base import StepLost
from tests.e2e.driver import LONG, PROMPTS, show

if torch.cuda.is_available():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class LosingWorker(AttentionWorker, Worker):  # type: ignore[misc]
    """Counts steps and loses those of `plan`: number -> how."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Worker.__init__(self, *args, **kwargs)
        self._lost, self._losses = None, 0
        self.plan: dict[int, str] = {}
        self.number, self.how = 0, ""
        self.runs_all = False  # negative control: also steps that were scheduled before a loss was known
        self.lost_rows: list[int] = []
        route = SimpleNamespace(under_way=None, check=self._check)
        self.link = SimpleNamespace(route=route, step=self._one_step)  # type: ignore[assignment]

    load_model = Worker.load_model
    compile_or_warm_up_model = Worker.compile_or_warm_up_model
    shutdown = Worker.shutdown

    @contextmanager
    def _one_step(self) -> Any:
        yield

    @staticmethod
    def _check(bad: bool | None) -> None:
        if bad:
            raise StepLost("a test")

    def prepare(self, plan: dict[int, str]) -> None:
        """Lose these steps of those that come."""
        self.plan, self.number = plan, 0
        if not hasattr(self, "hooked"):
            self.hooked = self.model_runner.get_model().model.layers[1].register_forward_hook(self._spoil)

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step; its number counts only where it has tokens."""
        if scheduler_output.total_num_scheduled_tokens:
            self.number += 1
            self.how = self.plan.pop(self.number, "")
            if self.how:
                self.lost_rows.append(scheduler_output.total_num_scheduled_tokens)
        self.link.route.under_way = self.how == "late"
        if self.runs_all:
            self._losses = 0
        return super().execute_model(scheduler_output)

    def _spoil(self, module: Any, args: Any, output: Any) -> Any:
        if self.how == "raised":
            raise StepLost("a test")
        if self.how == "late":
            return tuple(torch.full_like(each, 3.0) for each in output)
        return None


def allow_async_scheduling() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off, but its runner can do it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def main() -> None:
    """Run the plans of the spec one after the other, each against the run without a loss."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    from afdpatch.patches import scheduler

    scheduler.LostStepScheduler._repeat_s = property(lambda self: 60.0, lambda self, value: None)  # type: ignore
    if spec["async"] and not torch.cuda.is_available():
        allow_async_scheduling()
    kind = "AfdAsyncScheduler" if spec["async"] else "AfdScheduler"
    llm = LLM(
        model=spec["model"],
        scheduler_cls=f"afdpatch.patches.scheduler.{kind}",
        worker_cls="tests.e2e.losing.LosingWorker",
        async_scheduling=spec["async"],
        **spec["engine"],
    )
    engine: Any = llm.llm_engine
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    prompts = [*PROMPTS[:5], LONG * 2]

    def generate(prompts: list[str] = prompts, **sampling: Any) -> list[Any]:
        llm.reset_prefix_cache()
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True} | sampling)
        return [show(output) for output in llm.generate(prompts, params, use_tqdm=False)]

    worker.prepare({})
    worker.runs_all = spec.get("runs_all", False)
    found: dict[str, Any] = {
        "runner": type(worker.model_runner).__module__,
        "async": engine.vllm_config.scheduler_config.async_scheduling,
        "clean": generate(),
        "plans": {},
    }
    for name, plan in spec["plans"].items():
        worker.prepare({int(step): how for step, how in plan.items()})
        worker.lost_rows = []
        found["plans"][name] = {"outputs": generate(), "left": len(worker.plan), "rows": [*worker.lost_rows]}
        print(f"PLAN {name}", flush=True)
    Path(sys.argv[2]).write_text(json.dumps(found))
    worker.prepare({5: "late"})
    seeded = generate(
        prompts[:3], seed=7, temperature=0.8
    )  # short ones: vLLM's CPU runner fails on a chunk with a seed
    found["seeded"] = [choice["finish"][0] for output in seeded for choice in output["choices"]]
    worker.prepare({})
    found["again"] = generate()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
