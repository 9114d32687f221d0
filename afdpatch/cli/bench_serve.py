"""`afdpatch bench serve`: an AFD pair against a stock vLLM on the same cores, in alternating rounds."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afdpatch.cli import UsageError, bench_report, checks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from afdpatch.cli.load import Measured
    from afdpatch.cli.report import TextReporter
    from afdpatch.cli.servers import Server

OPTIONS = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "1024", "--no-enable-prefix-caching")
SETTINGS = (
    "model",
    "rounds",
    "requests",
    "concurrency",
    "words",
    "tokens",
    "stock_binding",
    "stock_args",
    "afd_args",
    "rest",
)

DESCRIPTION = """\
Compare AFD with stock vLLM at equal cores: the stock server may use all cores of this process (its threads bound as
vLLM does by itself, or to every core: --stock-binding), the pair's two servers half of them each. Both sides are up the
whole time and take turns under the same load (stock, AFD, AFD, stock, ...), so that what else the machine does falls on
both; the CPU time of the side that waits is measured too, and shown. The client runs on the same cores, for both alike.
"""

EPILOG = """\
example:
  afdpatch bench serve --rounds 6 --concurrency 4 --output bench.json --picture bench.svg

exit codes: 0 measured; 1 a server or a request failed; 2 wrong usage.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="AFD against stock vLLM at equal cores, in alternating rounds",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch bench serve [--model MODEL] [options] [vLLM's options for all three]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    add = parser.add_argument
    add(
        "--model", metavar="MODEL", help="a model's folder or name (default: tests/models/qwen3-moe of this repository)"
    )
    add("--rounds", type=int, default=6, metavar="N", help="measured rounds of each side (default: 6)")
    add("--requests", type=int, default=16, metavar="N", help="requests a round (default: 16)")
    add("--concurrency", type=int, default=4, metavar="N", help="requests at a time (default: 4)")
    add("--words", type=int, default=40, metavar="N", help="words in a prompt (default: 40)")
    add("--tokens", type=int, default=64, metavar="N", help="tokens in an answer (default: 64)")
    add(
        "--stock-binding",
        choices=("auto", "all"),
        default="auto",
        help="auto (default): vLLM's own binding, which leaves a core to the server's other processes and is faster on "
        "few cores; all: a thread on every core",
    )
    add("--stock-args", metavar="WORDS", help='options for the stock server alone: --stock-args="..."')
    add("--afd-args", metavar="WORDS", help='options for the pair alone: --afd-args="..."')
    add("--output", type=Path, metavar="FILE", help="write every measurement as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw the rounds (.svg or .png)")
    add("--log-dir", type=Path, metavar="DIR", help="where the logs go (default: logs/bench-DATE-TIME)")
    add("--timeout", type=float, default=600.0, metavar="S", help="how long the start may take (default: 600)")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import demo, report, topology
    from afdpatch.cli.servers import ServerError

    for name in ("rounds", "requests", "concurrency", "words", "tokens"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: expected 1 or more")
    if args.picture and args.picture.suffix not in (".svg", ".png"):
        raise UsageError(f"--picture {args.picture}: expected a name that ends in .svg or .png")
    args.model = demo.find_model(args.model)
    demo.refuse_stray_words(args.rest, "afdpatch bench serve --model MODEL")
    log_dir = args.log_dir or Path("logs") / time.strftime("bench-%Y%m%d-%H%M%S")
    checks.make_log_dir(log_dir)
    reporter = report.TextReporter()
    options = [args.model, *OPTIONS, "--max-num-seqs", str(max(args.concurrency, 4)), *args.rest]
    pair = topology.afd_pair([*options, *topology.split_words(args.afd_args)], log_dir)
    binding = topology.core_binding(1)[0] if args.stock_binding == "all" else None
    stock = topology.stock([*options, *topology.split_words(args.stock_args)], log_dir, binding=binding)
    servers = [*pair, stock]
    for text in topology.describe_defaults(servers, options):
        reporter.event("note", text=text)
    reporter.event("note", text=f"logs: {log_dir}/")
    report.terminate_as_interrupt()
    reason = "the measurement is over"
    try:
        report.bring_up(servers, args.timeout, reporter)
        rounds = measure(args, list(pair), stock, reporter)
        return tell(args, rounds, servers, reporter)
    except ServerError:
        reason = "a server failed"
        return 1
    except KeyboardInterrupt:
        reason = "interrupted"
        return 1
    finally:
        report.take_down(servers, reporter, reason)


def order(rounds: int) -> list[str]:
    """The sides in turn; every second pair of rounds the other way round, so that neither is always first."""
    return [side for number in range(rounds) for side in (("stock", "afd") if number % 2 == 0 else ("afd", "stock"))]


def measure(args: argparse.Namespace, pair: list[Server], stock: Server, reporter: TextReporter) -> list[Measured]:
    """A warm-up of each side, then the rounds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from afdpatch.cli.load import make_prompts, run_round
    from afdpatch.cli.servers import tree_cpu_seconds

    sides = {"stock": [stock], "afd": pair}
    prompts = make_prompts(args.requests, args.words)
    turns = order(args.rounds)
    rounds: list[Measured] = []
    terminal = reporter.console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=reporter.console, disable=not terminal, transient=True) as progress:
        bar = progress.add_task("warm-up", total=len(turns) + 2)
        for number, side in enumerate(["stock", "afd", *turns]):
            busy, idle = sides[side], sides["afd" if side == "stock" else "stock"]
            progress.update(bar, description=f"warm-up {side}" if number < 2 else f"round {number - 1}: {side}")
            before = [sum(tree_cpu_seconds(server.pid) for server in group) for group in (busy, idle)]
            measured = run_round(side, busy[0].url, args.model, prompts, args.tokens, args.concurrency)
            after = [sum(tree_cpu_seconds(server.pid) for server in group) for group in (busy, idle)]
            measured.cpu_seconds, measured.idle_cpu_seconds = after[0] - before[0], after[1] - before[1]
            for server in (*pair, stock):
                server.check()
            progress.advance(bar)
            if number >= 2:
                rounds.append(measured)
                if not terminal:
                    reporter.print(f"round {number - 1} of {len(turns)}: {side:<5} {measured.rate:8.1f} tokens/s")
    return rounds


def tell(args: argparse.Namespace, rounds: Sequence[Measured], servers: list[Server], reporter: TextReporter) -> int:
    """The table, the JSON, the picture; returns the exit code."""
    from afdpatch.cli.load import equal_answers, ratios, summarise

    errors = [error for measured in rounds for error in measured.errors]
    for error in errors[:5]:
        reporter.print(f"error: {error}", "bold red")
    if not all(measured.tokens for measured in rounds):
        reporter.print("error: a round had no answer at all; the logs say why", "bold red")
        return 1
    summary = {side: summarise(rounds, side) for side in ("stock", "afd")}
    by_pair = ratios(rounds)
    equal, both = equal_answers(rounds)
    reporter.console.print(table(summary))
    reporter.print(
        f"AFD makes {statistics.median(by_pair):.2f} times stock's tokens per second (median of {len(by_pair)} pairs "
        f"of rounds, {min(by_pair):.2f} to {max(by_pair):.2f})",
        "bold",
    )
    reporter.print(f"The same text from both, in every round: {equal} of {both} prompts")
    result = {
        "what": "afdpatch bench serve",
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": bench_report.processor(),
            "python": platform.python_version(),
        },
        "settings": {
            name: getattr(args, name)
            for name in (
                "model",
                "rounds",
                "requests",
                "concurrency",
                "words",
                "tokens",
                "stock_args",
                "afd_args",
                "rest",
            )
        },
        "bindings": {server.name: server.env for server in servers},
        "commands": {server.name: server.command[1:] for server in servers},
        "summary": summary,
        "afd_over_stock": {"median": statistics.median(by_pair), "by_pair_of_rounds": by_pair},
        "equal_answers": {"equal": equal, "of": both},
        "rounds": [measured.as_json() for measured in rounds],
    }
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        reporter.print(f"wrote {args.output}")
    if args.picture:
        draw(rounds, args)
        reporter.print(f"wrote {args.picture}")
    return 1 if errors else 0


def table(summary: dict[str, Any]) -> RenderableType:
    """Both sides beside each other."""
    from rich.table import Table

    out = Table(title="The same load, the same cores", title_justify="left")
    for column in ("", "stock vLLM", "AFD pair"):
        out.add_column(column, justify="right" if column else "left")

    def row(label: str, form: str, *keys: str) -> None:
        cells = []
        for side in ("stock", "afd"):
            value = summary[side]
            for key in keys:
                value = value[key]
            cells.append(form.format(value))
        out.add_row(label, *cells)

    row("output tokens/s, median of rounds", "{:,.1f}", "output_tokens_per_s", "median")
    row("  slowest round", "{:,.1f}", "output_tokens_per_s", "min")
    row("  fastest round", "{:,.1f}", "output_tokens_per_s", "max")
    row("time per output token, p50", "{:,.2f} ms", "tpot_ms", "p50")
    row("  p99", "{:,.2f} ms", "tpot_ms", "p99")
    row("time to first token, p50", "{:,.1f} ms", "ttft_ms", "p50")
    row("  p99", "{:,.1f} ms", "ttft_ms", "p99")
    row("cores used", "{:.2f}", "cores_used")
    row("  by the other side, which waits", "{:.2f}", "cores_used_by_the_idle_side")
    row("requests", "{:,}", "requests")
    return out


def draw(rounds: Sequence[Measured], args: argparse.Namespace) -> None:
    """Tokens per second by round, and the distribution of the time per output token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, label, colour in (("stock", "stock vLLM", "#777777"), ("afd", "AFD pair", "#1f77b4")):
        own = [measured for measured in rounds if measured.side == side]
        left.plot(range(1, len(own) + 1), [measured.rate for measured in own], "o-", color=colour, label=label)
        times = sorted(1e3 * value for measured in own for value in measured.tpot)
        right.plot(times, [(i + 1) / len(times) for i in range(len(times))], color=colour, label=label)
    left.set(xlabel="round", ylabel="output tokens per second", title="Throughput")
    left.set_ylim(bottom=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="time per output token [ms]", ylabel="share of requests", title="Latency")
    right.set_xlim(left=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    cores = len(os.sched_getaffinity(0))
    figure.suptitle(
        f"{Path(args.model).name}: {args.concurrency} requests at a time, {args.tokens} tokens each, {cores} cores",
        size=10,
    )
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=150)
    pyplot.close(figure)
