"""AFD pairs on GPUs against stock vLLM: `python -m tests.gpu.matrix OUT [--seconds S] [--only WORD,...]
[--connector ipc|nccl]`.

For each model an FFN server on one GPU, and one after the other attention engines of both runners, eager and with
graphs, on the other; stock engines beside them. Everything is logged to OUT, and OUT/results.json says what was equal.
It ends in time, whatever hangs.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afdpatch.cli import client
from tests.e2e.sameness import tokens_of
from tests.gpu.judge import across_padding, faults, judge, rounded

ROOT = Path(__file__).parents[2]
ARCHITECTURES = {"qwen3-moe": "Qwen3MoeForCausalLM", "deepseek-v2": "DeepseekV2ForCausalLM"}
LOST = "event=peer_lost"
CASES = ["batch:1", "batch:2", "batch:5", "batch:16", "chunked", "prefix", "seeded", "stop", "abort", "totals"]
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.1,
    "seed": 0,
    "dtype": "bfloat16",
    "kernel_config": {"enable_jit_warmup": False},
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
PIECES = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "custom_ops": ["all"],
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128],
    # Else Inductor chooses by time how a norm's sum is split, and two compilations of one model give two results. What
    # TORCHINDUCTOR_DETERMINISTIC says is lost when Dynamo, having traced, sets back torch.use_deterministic_algorithms.
    # The combined kernels that vLLM asks for are chosen by time alone.
    "inductor_compile_config": {"deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False},
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graph": {"compilation_config": GRAPHS},
    "pieces": {"compilation_config": PIECES},
    "only-pieces": {"compilation_config": PIECES | {"cudagraph_mode": "PIECEWISE"}},
}
COMPILED = ("pieces", "only-pieces")
"""Here stock's FFNs are called through the hop's op, and it is cut there: what is compiled is the same on both sides.
Where it isn't, log-probabilities are apart as those of stock vLLM are, compiled and not (0.3 to 0.6 were seen)."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "NO_COLOR": "1",
}


def below(pid: int) -> list[int]:
    """All descendants of a process, the youngest generation first."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    last = [pid]
    while last:
        last = [child for one in last for child in parents.get(one, [])]
        found[:0] = last
    return found


def alike(model: str, mode: str) -> dict[str, Any]:
    """What a stock engine's spec needs so that the same is compiled as in the pair."""
    return {"local_op": ARCHITECTURES[model], "cut": True} if mode in COMPILED else {}


SWITCHABLE = ("--worker-cls", "tests.gpu.workers.SwitchableFFNWorker")


class Matrix:
    """All processes of a run, their logs and what they said."""

    def __init__(self, out: Path, seconds: float, connector: str = "ipc") -> None:
        self.out = out
        self.connector = connector
        self.base = 4100 if connector == "ipc" else 4500  # of the ports: two runs may go on side by side
        self.end_at = time.monotonic() + seconds
        self.started = time.monotonic()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.results: dict[str, Any] = {}
        self.lock = threading.Lock()

    def left(self) -> float:
        """Seconds until this run ends."""
        return max(0.0, self.end_at - time.monotonic())

    def say(self, text: str) -> None:
        """A line with the time since the start."""
        print(f"[{time.monotonic() - self.started:6.1f}] {text}", flush=True)

    def start(self, name: str, command: list[str], gpus: str, **more: str) -> "subprocess.Popen[bytes]":
        """A process of its own session, on these GPUs; its log is NAME.log."""
        environment = {**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": gpus, **more}
        with (self.out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.out, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        with self.lock:
            self.processes.append(process)
        return process

    def ffn(
        self,
        name: str,
        model: Path,
        afd_port: int,
        port: int,
        gpus: str,
        *options: str,
        attention_ranks: int = 1,
        extra: dict[str, Any] | None = None,
        **environment: str,
    ) -> "subprocess.Popen[bytes]":
        """An FFN server whose FFNs can be zeroed."""
        words = [sys.executable, "-m", "afdpatch", "serve", "--role", "ffn", str(model), "--afd-port", str(afd_port)]
        afd = {
            "connector": self.connector,
            "num_attention_ranks": attention_ranks,
            "connector_extra_config": extra or {"hop_timeout_s": 60},
        }
        words += [
            "--afd-config",
            json.dumps(afd),
            "--port",
            str(port),
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "1024",
            "--enforce-eager",
        ]
        words += ["--gpu-memory-utilization", "0.1", *options]
        return self.start(name, words, gpus, **environment)

    def driver(
        self, name: str, spec: dict[str, Any], gpus: str, runner: str, **environment: str
    ) -> "subprocess.Popen[bytes]":
        """One engine that runs the spec's cases."""
        (self.out / f"{name}.spec.json").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "tests.e2e.driver", f"{name}.spec.json", f"{name}.json"]
        return self.start(name, command, gpus, VLLM_USE_V2_MODEL_RUNNER=runner, **environment)

    def finish(self, name: str, process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
        """Wait for a driver; what it saw, or None (its log says why)."""
        try:
            code: int | str = process.wait(min(seconds, self.left()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler writes where it was, and the process ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            self.kill(process)
            code = "killed at its deadline"
        self.say(f"{name}: {code}")
        self.results[f"{name}:exit"] = code
        file = self.out / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """SIGKILL to a process and all below it."""
        for pid in [*below(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def wait_for(self, name: str, text: str, seconds: float, process: "subprocess.Popen[bytes]") -> bool:
        """Whether a log says something in time."""
        return self.until(lambda: text in (self.out / f"{name}.log").read_text(errors="replace"), seconds, process)

    def wait_for_hops(self, port: int, process: "subprocess.Popen[bytes]") -> bool:
        """Whether an attention process's hops are seen at an FFN server: its batch is under way."""
        before = self.hops(port)
        return self.until(lambda: self.hops(port) > before + 100, 60, process)

    def until(self, condition: Callable[[], bool], seconds: float, process: "subprocess.Popen[bytes]") -> bool:
        """Whether a condition holds in time, while a process lives."""
        end = time.monotonic() + min(seconds, self.left())
        tick = threading.Event()
        while time.monotonic() < end:
            if condition():
                return True
            if process.poll() is not None:
                return False
            tick.wait(0.2)
        return False

    def chain(self, name: str, runner: str, index: int, cases: list[str], modes: list[str], losses: list[str]) -> None:
        """All that is done with one model and runner, on an FFN server of its own.

        Args:
            cases: what is generated in each of `modes`, by stock vLLM and by the pair.
            losses: the modes in which a role is killed.
        """
        folder = ROOT / "tests" / "models" / name
        afd_port, port = self.base + index, self.base + 100 + index
        chain = f"{name}-v{int(runner) + 1}"
        afd = {
            "role": "attention",
            "port": afd_port,
            "connector": self.connector,
            "connector_extra_config": {"hop_timeout_s": 60, "connect_timeout_s": 300},
        }
        if runner == "0":  # V1 compiles a kernel for two minutes for it
            cases = [case for case in cases if case != "seeded"]
        server = self.ffn(f"{chain}-ffn", folder, afd_port, port, "1,0", *SWITCHABLE)
        spec = {"model": str(folder), "cases": cases, "dump_after_s": 170}
        results: dict[str, Any] = {}
        counted = 0.0
        for mode in modes if cases else []:
            full = f"{chain}-{mode}"
            both = spec | {"engine": ENGINE | MODES[mode]}
            stock = self.driver(f"{full}-stock", both | alike(name, mode), "01"[index % 2], runner)
            hopping = both | {"afd": afd, "zero_url": f"http://127.0.0.1:{port}"}
            process = self.driver(f"{full}-afd", hopping, "0,1", runner)
            seen = self.finish(f"{full}-afd", process, 300)
            same = self.finish(f"{full}-stock", stock, 120)
            self.results[full] = judge(same, seen, cases)
            results[mode] = same, seen
            if same is not None and seen is not None:
                before, counted = counted, self.hops(port)
                self.results[full]["ffn hops"] = counted - before
            self.say(f"{full}: {json.dumps(self.results[full])[:600]}")
        if {"eager", "graph"} <= results.keys() and results["eager"][0] and results["graph"][1]:
            found = across_padding(results["eager"][0], results["graph"][1], cases)
            self.results[f"{chain}-padding"] = found
            self.say(f"{chain}-padding: {found}")
        for mode in losses:
            self.kill_attention(chain, folder, afd, mode, server, runner, port)
        for mode in losses:
            server = self.survive(chain, folder, afd, mode, server, runner, afd_port, port)

    def survive(
        self,
        chain: str,
        folder: Path,
        afd: dict[str, Any],
        mode: str,
        server: "subprocess.Popen[bytes]",
        runner: str,
        afd_port: int,
        port: int,
    ) -> "subprocess.Popen[bytes]":
        """Kill the FFN server while a batch is generated, and start another: the batch goes on and ends whole."""
        full = f"{chain}-{mode}-survive"
        if self.left() < 60:
            self.results[full] = "no time was left"
            return server
        extra = afd["connector_extra_config"] | {"recovery_timeout_s": 100}
        spec = {
            "model": str(folder),
            "cases": ["survive"],
            "engine": ENGINE | MODES[mode],
            "afd": afd | {"connector_extra_config": extra},
        }
        process = self.driver(full, spec, "0,1", runner)
        if not (self.wait_for(full, "CASE generating", 250, process) and self.wait_for_hops(port, process)):
            self.results[full] = "it never generated"
            self.say(f"{full}: it never generated")
            self.kill(process)
            return server
        self.kill(server)
        server = self.ffn(f"{chain}-ffn-{mode}-again", folder, afd_port, port, "1,0", *SWITCHABLE)
        seen = self.finish(full, process, 160)
        self.results[full] = seen["cases"]["survive"] if seen else None
        self.say(f"{full}: {self.results[full]}")
        return server

    def two(self, name: str, mode: str, cases: list[str]) -> None:
        """Two attention servers on one GPU at one FFN server: each by itself, or eager and computed together."""
        index, merge = [*MODES].index(mode), mode == "eager"
        folder, afd_port, port = ROOT / "tests" / "models" / name, self.base + 20 + index, self.base + 120 + index
        full = f"{name}-merged" if merge else f"{name}-two-{mode}"
        extra = {"hop_timeout_s": 60, "connect_timeout_s": 300, "merge": merge}
        self.ffn(f"{full}-ffn", folder, afd_port, port, "1,0", *SWITCHABLE, attention_ranks=2, extra=extra)
        spec: dict[str, Any] = {"model": str(folder), "cases": cases, "engine": ENGINE | MODES[mode]}
        afd = {"role": "attention", "port": afd_port, "connector": self.connector, "num_attention_ranks": 2}
        afd["connector_extra_config"] = extra
        stock = self.driver(f"{full}-stock", spec | alike(name, mode), "1", "1")
        both = [self.driver(f"{full}-afd{rank}", spec | {"afd": afd | {"rank": rank}}, "0,1", "1") for rank in (0, 1)]
        same = self.finish(f"{full}-stock", stock, 250)
        for rank, process in enumerate(both):
            seen = self.finish(f"{full}-afd{rank}", process, 250)
            if merge and same and seen:
                self.results[f"{full}-{rank}"] = across_padding(same, seen, cases)
            else:
                self.results[f"{full}-{rank}"] = judge(same, seen, cases)
            self.say(f"{full}-{rank}: {json.dumps(self.results[f'{full}-{rank}'])[:500]}")
        if merge:
            page = client.metrics(f"http://127.0.0.1:{port}")
            self.results[f"{full}-hops"] = {
                "merged": client.total(page, "afd_hops_merged_total"),
                "of": self.hops(port),
            }
            self.say(f"{full}-hops: {self.results[f'{full}-hops']}")

    def fp8(self, name: str, index: int) -> None:
        """A pair whose hidden states travel in 8 bits: perplexity of held-out text, and a batch in graphs."""
        folder, afd_port, port = ROOT / "tests" / "models" / name, self.base + 40 + index, self.base + 140 + index
        full, case = f"{name}-fp8", "perplexity:8"
        extra = {"hop_timeout_s": 60, "connect_timeout_s": 300, "a2f_dtype": "fp8_e4m3"}
        afd = {"role": "attention", "port": afd_port, "connector": self.connector, "connector_extra_config": extra}
        self.ffn(f"{full}-ffn", folder, afd_port, port, "1,0", *SWITCHABLE, extra=extra)
        seen: dict[str, Any] = {}
        for label, mode, cases in (
            ("stock", "eager", [case]),
            ("eager", "eager", [case]),
            ("graph", "graph", [case, "batch:16"]),
        ):
            spec = {"model": str(folder), "cases": cases, "engine": ENGINE | MODES[mode]}
            if label != "stock":
                spec["afd"] = afd
            seen[label] = self.finish(f"{full}-{label}", self.driver(f"{full}-{label}", spec, "0,1", "1"), 300)
        for label in ("eager", "graph"):
            self.results[f"{full}-{label}"] = rounded(seen["stock"], seen[label], case)
            self.say(f"{full}-{label}: {self.results[f'{full}-{label}']}")

    def stale(self, name: str, other_site: str) -> None:
        """A compile cache of another manifest is not served; with the key defeated it would be."""
        folder, afd_port, port = ROOT / "tests" / "models" / name, self.base + 30, self.base + 130
        cache = {"VLLM_CACHE_ROOT": str(self.out / "stale-cache")}
        other = cache | {"PYTHONPATH": os.pathsep.join([other_site, *filter(None, [os.environ.get("PYTHONPATH")])])}
        afd = {"role": "attention", "port": afd_port, "connector": self.connector}
        afd["connector_extra_config"] = {"hop_timeout_s": 60, "connect_timeout_s": 300}
        engine = ENGINE | {"compilation_config": {k: v for k, v in GRAPHS.items() if k != "mode"}}
        spec: dict[str, Any] = {"model": str(folder), "cases": ["batch:1"], "engine": engine, "afd": afd}
        found: dict[str, Any] = {}
        self.results["stale"] = found
        for label, environment, steps in (
            ("X", cache, (("cold", {}), ("warm", {}), ("keyless", {"constant_key": "0"}))),
            ("Y", other, (("edited", {}), ("keyless-edited", {"constant_key": "0"}))),
        ):
            server = self.ffn(f"stale-{label}-ffn", folder, afd_port, port, "1,0", **environment)
            for step, more in steps:
                full = f"stale-{label}-{step}"
                process = self.driver(full, spec | more, "0,1", "1", **environment)
                seen = self.finish(full, process, 200)
                log = (self.out / f"{full}.log").read_text(errors="replace")
                found[f"{label} {step}"] = {
                    "folders": sorted(set(re.findall(r"(?:torch_aot_compile|torch_compile_cache)/[0-9a-f]{8,}", log))),
                    "loaded": "Directly load AOT compilation" in log,
                    "compilation_s": re.findall(r"torch.compile took ([0-9.]+) s", log),
                    "tokens": tokens_of(seen["cases"]["batch:1"]) if seen else None,
                }
                self.say(f"{full}: {found[f'{label} {step}']}")
            self.kill(server)

    def hops(self, port: int) -> float:
        """How many hops an FFN server has counted so far."""
        return client.total(client.metrics(f"http://127.0.0.1:{port}"), "afd_hops_total") or 0.0

    def kill_attention(
        self,
        chain: str,
        folder: Path,
        afd: dict[str, Any],
        mode: str,
        server: "subprocess.Popen[bytes]",
        runner: str,
        port: int,
    ) -> None:
        """Kill the attention process while a batch is generated."""
        full = f"{chain}-{mode}-kill-attention"
        if self.left() < 40:
            self.results[full] = "no time was left"
            return
        spec = {"model": str(folder), "cases": ["forever"], "engine": ENGINE | MODES[mode], "afd": afd}
        process = self.driver(full, spec, "0,1", runner)
        if not (self.wait_for(full, "CASE forever", 250, process) and self.wait_for_hops(port, process)):
            self.results[full] = "it never generated"
            self.say(f"{full}: it never generated")
            self.kill(process)
            return
        log = self.out / f"{chain}-ffn.log"
        before, at = log.read_text(errors="replace").count(LOST), time.monotonic()
        self.kill(process)
        gone = self.until(lambda: log.read_text(errors="replace").count(LOST) > before, 30, server)
        self.results[full] = {"ffn noticed": gone, "s": round(time.monotonic() - at, 3)}
        self.say(f"{full}: {self.results[full]}")

    def task(self, name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        """A thread that does it; what it raises is an error in the results."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException:  # SystemExit too, which a thread ends with in silence
                self.results[f"{name}:error"] = traceback.format_exc()
                self.say(traceback.format_exc())

        return threading.Thread(target=run, name=name, daemon=True)

    def run(self, tasks: list[threading.Thread]) -> None:
        """Do them all side by side; one that isn't done when this run ends is an error in the results."""
        for task in tasks:
            task.start()
        for task in tasks:
            task.join(self.left())
            if task.is_alive():
                self.results[f"{task.name}:error"] = "it wasn't done in time"

    def end(self) -> None:
        """Nothing outlives the run."""
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))


def words(text: str) -> list[str]:
    """What stands between a text's commas."""
    return [word for word in text.split(",") if word]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--only", default="", help="chains whose name, such as qwen3-moe-v2, has one of these words")
    parser.add_argument("--connector", default="ipc", choices=("ipc", "nccl"))
    parser.add_argument("--two", default="", help="model of two attention servers at one FFN server")
    parser.add_argument("--fp8", default="", help="models of pairs whose hidden states travel in 8 bits")
    parser.add_argument("--stale", default="", help="a folder with afdpatch under another manifest")
    parser.add_argument("--cases", default=",".join(CASES), help="empty: losses only")
    parser.add_argument("--modes", default=",".join(MODES), help="in which stock vLLM and the pair are compared")
    parser.add_argument("--losses", default="graph,eager", help="modes in which a role is killed; empty: none")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    matrix = Matrix(args.out, args.seconds, args.connector)
    chains = [(model, runner) for model in ("qwen3-moe", "deepseek-v2") for runner in ("1", "0")]
    lists = (words(args.cases), words(args.modes), words(args.losses))
    threads = []
    for index, (model, runner) in enumerate(chains):
        name = f"{model}-v{int(runner) + 1}"
        if any(word in name for word in args.only.split(",")):
            threads.append(matrix.task(name, matrix.chain, model, runner, index, *lists))
    if args.two:
        cases = ["batch:5", "batch:16", "totals"]
        for mode, more in (("graph", []), ("pieces", ["chunked"]), ("eager", ["chunked"])):
            threads.append(matrix.task(f"{args.two}-two-{mode}", matrix.two, args.two, mode, cases + more))
    for index, model in enumerate(words(args.fp8)):
        threads.append(matrix.task(f"{model}-fp8", matrix.fp8, model, index))
    if args.stale:
        threads.append(matrix.task("stale", matrix.stale, "qwen3-moe", args.stale))
    matrix.run(threads)
    matrix.end()
    if found := faults(matrix.results):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
