"""`afdpatch bench tpot`: time per output token of an AFD pair on two GPUs beside stock vLLM's on one of them.

Three processes: an FFN server, an attention engine and a stock engine. Both engines are there all the time and are told
in turns to decode a batch, so that what changes with time is the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from afdpatch.cli import UsageError, checks
from afdpatch.cli.bench_report import (
    Line,
    Report,
    add_output,
    command,
    draw_lines,
    gpu_machine,
    have_gpus,
    print_table,
    tell,
)
from afdpatch.cli.servers import Server, ServerError, free_port

DESCRIPTION = """\
Measure the time per output token of an AFD pair on two GPUs, and of stock vLLM on one of them: a batch of random
prompts is decoded, and the time between two steps that gave every request a token is taken, and that until every one
had its first. How long the engines took to start is in the report. Pair and stock take turns; each batch is measured
--repeats times after a warm-up. The figure is the median of the repeats' medians."""
EPILOG = "Example: afdpatch bench tpot --model tests/models/deepseek-v2 --shape deepseek-v2-lite --output tpot.json"
BATCHES = (1, 16, 32, 64, 128)
SHAPES: dict[str, dict[str, int]] = {
    "deepseek-v2-lite": {
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
}
"""What a small model's configuration gets to become a large one with dummy weights."""
SIDES = ("afd", "stock")
GRAPHS = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
PIECES = (128, 256, 512)
"""Rows that piecewise graphs are captured with, beside the batches: those of short prompts."""
TARGET = 1.08
"""The pair's time over stock vLLM's that was to be reached, from batch 16 on."""
ENGINE = "afdpatch.patches.bench_engine"
ROUND_S = 120.0
"""The longest that one batch may take."""
ROWS = 8192
"""Tokens of a step at most, and rows of a hop."""
MEMORY = 0.3
"""The share of a GPU that each of the two engines on it may take."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `tpot`."""
    parser = subparsers.add_parser(
        "tpot",
        help="time per output token on GPUs: AFD against stock vLLM",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, at_least = parser.add_argument, checks.at_least
    add("--model", required=True, metavar="DIR", help="the model's folder")
    add("--shape", choices=sorted(SHAPES), help="with the sizes of this model in its configuration, and dummy weights")
    add("--batches", type=at_least(1), nargs="+", default=list(BATCHES), metavar="N", help="default: 1 16 32 64 128")
    add("--context", type=at_least(2), default=1024, metavar="N", help="tokens of each prompt; default 1024")
    add("--tokens", type=at_least(8), default=80, metavar="N", help="that each request generates; default 80")
    add("--repeats", type=at_least(3), default=3, metavar="N", help="of each batch and side; default 3")
    add("--runner", choices=("1", "2"), default="2", help="vLLM's model runner; default 2, vLLM's own default on CUDA")
    add("--connector", default="ipc", metavar="NAME", help="default: ipc")
    add("--graphs", choices=GRAPHS, default=GRAPHS[0], help=f"vLLM's cudagraph_mode; default {GRAPHS[0]}, vLLM's own")
    add("--all-sizes", action="store_true", help="capture all sizes that vLLM would, not those measured only")
    add("--enforce-eager", action="store_true", help="no CUDA graphs and no compilation, on both sides")
    add("--kv-cache-gib", type=at_least(1), default=8, metavar="N", help="KV cache of each engine; default 8")
    add("--devices", type=at_least(0), nargs=2, default=[0, 1], metavar="GPU", help="attention's and stock's, FFN's")
    add("--timeout", type=float, default=600.0, metavar="S", help="how long the start may take; default 600")
    add("--log-dir", type=Path, metavar="DIR", help="where the logs go (default: logs/bench-DATE-TIME)")
    add_output(parser, picture=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0, or 1 when a process of the measurement died or there are no two GPUs."""
    if not (Path(args.model) / "config.json").is_file():
        raise UsageError(f"--model {args.model}: expected a folder with a config.json")
    if not have_gpus("tpot", args.devices):
        return 1
    args.log_dir = args.log_dir or Path("logs") / time.strftime("bench-%Y%m%d-%H%M%S")
    checks.make_log_dir(args.log_dir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engines and the FFN server end with this one
    try:
        with _sides(args) as sides:
            results = measure(sides, args)
            version = sides["stock"].version
            starts = {name: round(each.start_s, 1) for name, each in sides.items()}
    except (ServerError, EngineLost) as error:
        print(f"afdpatch: error: bench tpot: {error}; the logs are in {args.log_dir}", file=sys.stderr)
        return 1
    report = {
        "command": command(),
        "machine": gpu_machine(args.devices) | {"vllm": version},
        "model": args.shape or Path(args.model).name,
        "weights": "dummy" if args.shape else "the model's",
        "context": args.context,
        "tokens": args.tokens,
        "runner": f"V{args.runner}",
        "graphs": "none, eager" if args.enforce_eager else f"{args.graphs}, compiled",
        "connector": args.connector,
        "sizes": "all" if args.all_sizes else "measured",
        "start_s": starts,
        "results": results,
    }
    return tell(report, args, show, draw)


# Measuring


class EngineLost(Exception):
    """An engine died or didn't answer in time; the text names it."""


class Engine:
    """One engine in a process of its own; see `afdpatch.patches.bench_engine`."""

    version = ""
    start_s = math.nan
    """Seconds from vLLM's import to an engine that can compute; the pair's waits for its FFN server too."""

    def __init__(self, name: str, spec: Report, log: Path, env: dict[str, str]) -> None:
        self.name = name
        self._sock, theirs = socket.socketpair()
        fd = theirs.fileno()
        words = [sys.executable, "-m", ENGINE, str(fd), json.dumps(spec)]
        with theirs, log.open("wb") as out:
            self._process = subprocess.Popen(
                words, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, pass_fds=[fd]
            )
        self._answers = self._sock.makefile("r")

    def ask(self, seconds: float, **order: int) -> Report:
        """The engine's answer to an order; without one, what it says when it has started.

        Raises:
            EngineLost: it died, or took longer.
        """
        with contextlib.suppress(OSError):  # it has gone: then nothing is read
            if order:
                self._sock.sendall(json.dumps(order).encode() + b"\n")
            if not select.select([self._sock], [], [], seconds)[0]:
                raise EngineLost(f"the engine {self.name} gave no answer within {seconds:.0f} s")
            if answer := self._answers.readline():
                found: Report = json.loads(answer)
                return found
        raise EngineLost(f"the engine {self.name} has ended")

    def close(self) -> None:
        """End it: it does so by itself when its socket is closed."""
        self._answers.close()
        self._sock.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _sides(args: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    """Both engines, started, and the FFN server."""
    model, options = Path(args.model), {}
    if args.shape:
        model, options = make_model(args.log_dir / "model", model, args.shape), {"load_format": "dummy"}
    first, second = map(str, args.devices)
    port, afd_port = free_port(), free_port()
    env = {"VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(args.runner) - 1)}
    words = [sys.executable, "-m", "afdpatch", "serve", "--role", "ffn", str(model), "--port", str(port)]
    words += ["--afd-port", str(afd_port), "--connector", args.connector, "--enforce-eager", "--dtype", "bfloat16"]
    words += [
        "--gpu-memory-utilization",
        str(MEMORY),
        "--max-num-batched-tokens",
        str(ROWS),
        *(["--load-format", "dummy"] if args.shape else []),
    ]
    theirs = {"CUDA_VISIBLE_DEVICES": f"{second},{first}"}
    ffn = Server("ffn", words, port, args.log_dir / "ffn.log", env=env | theirs)
    engine = options | {
        "max_model_len": args.context + args.tokens,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": ROWS,
        "gpu_memory_utilization": MEMORY,
        "kv_cache_memory_bytes": args.kv_cache_gib << 30,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    if args.enforce_eager:
        engine["enforce_eager"] = True
    else:
        engine["compilation_config"] = compilation = {"cudagraph_mode": args.graphs}
        if not args.all_sizes:
            more = PIECES if "PIECEWISE" in args.graphs else ()
            compilation["cudagraph_capture_sizes"] = sorted({*args.batches, *more})
    afd = {"role": "attention", "port": afd_port, "connector": args.connector}
    with contextlib.ExitStack() as stack:
        stack.enter_context(ffn)
        sides = {}
        for name, role in (("afd", afd), ("stock", None)):
            spec = {"model": str(model), "engine": engine, "afd": role}
            seen = env | runner | {"CUDA_VISIBLE_DEVICES": f"{first},{second}" if role else first}
            sides[name] = Engine(name, spec, args.log_dir / f"{name}.log", seen)
            stack.callback(sides[name].close)
        until = time.monotonic() + args.timeout
        for each in sides.values():
            said = each.ask(max(0.0, until - time.monotonic()))
            each.version, each.start_s = said["vllm"], said["start_s"]
        yield sides


def make_model(folder: Path, like: Path, shape: str) -> Path:
    """A folder with the files of a model but its weights, and a configuration of other sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((like / "config.json").read_text()) | SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(sides: dict[str, Engine], args: argparse.Namespace) -> list[Report]:
    """Every batch on both sides in turns; the first turn is a warm-up. One result for each batch and side."""
    runs: dict[tuple[str, int], list[Report]] = {(side, n): [] for n in args.batches for side in SIDES}
    for turn in range(args.repeats + 1):
        for batch in args.batches:
            for side in SIDES if turn % 2 else reversed(SIDES):
                order = {"batch": batch, "context": args.context, "tokens": args.tokens, "number": turn}
                runs[side, batch].append(sides[side].ask(ROUND_S, **order))
        print(f"bench tpot: turn {turn} of {args.repeats}", file=sys.stderr, flush=True)
    return [result(side, batch, answers[1:]) for (side, batch), answers in runs.items()]


def result(side: str, batch: int, answers: Sequence[Report]) -> Report:
    """The figures of one line, in milliseconds: the median of the repeats' medians, these, and all steps' tail."""
    repeats = [answer["steps_ms"] for answer in answers]
    firsts = [answer["first_ms"] for answer in answers]
    medians = [statistics.median(steps) for steps in repeats]
    cuts = statistics.quantiles([step for steps in repeats for step in steps], n=100, method="inclusive")
    return {
        "side": side,
        "batch": batch,
        "ms": round(statistics.median(medians), 4),
        "repeats_ms": [round(each, 4) for each in medians],
        "steps": sum(map(len, repeats)),
        "p10_ms": round(cuts[9], 4),
        "p90_ms": round(cuts[89], 4),
        "p99_ms": round(cuts[98], 4),
        "first_ms": round(statistics.median(firsts), 3),
        "firsts_ms": [round(each, 3) for each in firsts],
    }


# Reporting


def _lines(report: Report) -> dict[int, dict[str, Any]]:
    table: dict[int, dict[str, Any]] = {}
    for each in report["results"]:
        table.setdefault(each["batch"], {})[each["side"]] = each
    return table


def show(report: Report) -> None:
    """One line for each batch."""
    rows = []
    for batch, line in _lines(report).items():
        afd, stock = line["afd"], line["stock"]
        spread = [f"{min(each['repeats_ms']):.3f} to {max(each['repeats_ms']):.3f}" for each in (afd, stock)]
        tails = [f"{each['p10_ms']:.2f} / {each['p90_ms']:.2f}" for each in (afd, stock)]
        gain = f"{100 * (afd['ms'] / stock['ms'] - 1):+.1f} %"
        firsts = [f"{each['first_ms']:.1f}" if "first_ms" in each else "" for each in (afd, stock)]  # older reports
        rows.append([str(batch), f"{afd['ms']:.3f}", f"{stock['ms']:.3f}", gain, *spread, *tails, *firsts])
    host = report["machine"]
    print_table(
        f"Milliseconds per output token: {report['model']}, {report['weights']} weights, context {report['context']}, "
        f"{' and '.join(host['gpus'])}, vLLM {host['vllm']}, runner {report['runner']}, graphs: {report['graphs']}",
        (
            "batch",
            "AFD",
            "stock",
            "AFD / stock",
            "AFD repeats",
            "stock repeats",
            "AFD p10 / p90",
            "stock p10 / p90",
            "AFD first",
            "stock first",
        ),
        rows,
    )
    if starts := report.get("start_s"):  # not in older reports
        print(f"Start: AFD {starts['afd']:.1f} s, stock {starts['stock']:.1f} s; sizes captured: {report['sizes']}")


def draw(report: Report, path: Path) -> None:
    """Both sides over the batch, and what was to be reached."""
    table = _lines(report)
    look = {"afd": ("AFD, two GPUs", "#1f4e8c"), "stock": ("stock vLLM, one GPU", "#777777")}
    lines = []
    for side in SIDES:
        points = {n: (line[side]["ms"], line[side]["repeats_ms"]) for n, line in table.items()}
        lines.append(Line(*look[side], points, "{:.2f}", below=side == "stock"))
    draw_lines(
        path,
        lines,
        title=f"{report['model']}, context {report['context']}, {report['graphs']}",
        xlabel="batch",
        ylabel="time per output token, ms (median)",
        yticks=(1, 2, 3, 5, 10, 20, 50),
        marks={n: TARGET * line["stock"]["ms"] for n, line in table.items() if n >= 16},
    )
