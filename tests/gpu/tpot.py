"""Time per output token of one engine: `python -m tests.gpu.tpot SPEC OUT`, both JSON files.

A batch of random prompts is decoded; the figure is the median time between two steps that gave every request a token.
It waits for the file `go` of the spec before it measures, so that engines can start side by side.
"""

import faulthandler
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "vocab_size": 102400,
    "max_position_embeddings": 8192,
}
"""What makes DeepSeek-V2-Lite of the small trained model's configuration."""


def make_model(folder: Path, like: Path, **changes: Any) -> Path:
    """A folder with the configuration and tokenizer of a model of this shape, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((like / "config.json").read_text()) | SHAPE | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Start the engine, wait, measure."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    faulthandler.dump_traceback_later(spec.get("dump_after_s", 300), repeat=True)
    if spec.get("afd"):
        import afdpatch  # noqa: F401
    from vllm import LLM, SamplingParams

    additional = {"additional_config": {"afd": spec["afd"]}} if spec.get("afd") else {}
    llm = LLM(model=spec["model"], **spec["engine"], **additional)
    print("STARTED", flush=True)
    until = time.monotonic() + spec.get("go_s", 300)
    tick = threading.Event()
    while not Path(spec["go"]).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"expected {spec['go']} within {spec.get('go_s', 300)} s")
        tick.wait(0.1)
    engine: Any = llm.llm_engine
    chance = random.Random(0)
    found: dict[str, Any] = {}
    for batch in spec["batches"]:
        runs = []
        for repeat in range(spec["repeats"] + 1):
            params = SamplingParams(temperature=0.0, max_tokens=spec["tokens"], ignore_eos=True, detokenize=False)
            for index in range(batch):
                prompt = {"prompt_token_ids": [chance.randrange(1000, 2000) for _ in range(spec["context"])]}
                engine.add_request(f"{batch}-{repeat}-{index}", prompt, params)
            steps: list[float] = []
            last = 0.0
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter()
                if len(outputs) == batch and last:
                    steps.append(now - last)
                last = now if len(outputs) == batch else 0.0
            if repeat:  # the first is warm-up
                runs.append(1000 * statistics.median(steps))
        found[str(batch)] = {"ms": statistics.median(runs), "runs": runs}
        print(f"TPOT batch {batch}: {found[str(batch)]}", flush=True)
        Path(sys.argv[2]).write_text(json.dumps(found))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
