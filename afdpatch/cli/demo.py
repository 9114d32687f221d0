"""`afdpatch demo`: an AFD pair and a stock vLLM answer the same prompts side by side; are their tokens the same?"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afdpatch.cli import UsageError, checks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from afdpatch.cli.client import Completion, Metrics
    from afdpatch.cli.report import TextReporter
    from afdpatch.cli.servers import Server

MODEL = "tests/models/qwen3-moe"
PROMPTS = (
    "The :func:`open` function returns",
    "This module provides",
    "If *key* is not in the dictionary, ",
    "Changed in version 3.8: The",
)
OPTIONS = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "4")
NAMES = ("AFD: attention + FFN server", "stock vLLM")

DESCRIPTION = """\
Start an AFD pair and a stock vLLM (the same program, AFD off) for one model, send both the same prompts (greedy), show
both answers side by side as they come, and say whether every token and every log-probability is the same. Then show
what crosses between the two servers, and how much of the model each of them holds.
"""

EPILOG = """\
example:
  afdpatch demo
  afdpatch demo --model tests/models/deepseek-v2 --tokens 100

The three servers share this machine's cores, so the demo says nothing about speed: `afdpatch bench serve` does.

exit codes: 0 the same tokens; 1 other tokens, or a server failed; 2 wrong usage.
"""


@dataclass
class Round:
    """One prompt, asked of both sides."""

    prompt: str
    answers: list[Completion | None] = field(default_factory=lambda: [None, None])
    errors: list[str | None] = field(default_factory=lambda: [None, None])

    @property
    def verdict(self) -> Verdict:
        return compare(*self.answers)


@dataclass
class Verdict:
    """How two answers compare: tokens compared, the first position that differs, the largest difference in logprob."""

    tokens: int
    differs_at: int | None
    logprob_gap: float

    @property
    def same(self) -> bool:
        return self.differs_at is None and self.tokens > 0

    def __str__(self) -> str:
        if self.differs_at is not None:
            return f"token {self.differs_at + 1} differs"
        if not self.tokens:
            return "no tokens"
        gap = "log-probabilities too" if self.logprob_gap == 0 else f"log-probabilities within {self.logprob_gap:.2g}"
        return f"all {self.tokens} tokens the same, {gap}"


def compare(first: Completion | None, second: Completion | None) -> Verdict:
    """Token by token; answers of unequal length differ where the shorter one ends."""
    ours, theirs = (answer.tokens if answer else [] for answer in (first, second))
    gap = 0.0
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one.text != other.text:
            return Verdict(max(len(ours), len(theirs)), position, gap)
        if one.logprob is not None and other.logprob is not None:
            gap = max(gap, abs(one.logprob - other.logprob))
    shorter, longer = sorted((len(ours), len(theirs)))
    return Verdict(longer, None if shorter == longer else shorter, gap)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="an AFD pair and a stock vLLM side by side: are the tokens the same?",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch demo [--model MODEL] [--tokens N] [--keep] [vLLM's options for all three]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    add = parser.add_argument
    add("--model", metavar="MODEL", help=f"a model's folder or name (default: {MODEL}, which is in this repository)")
    add("--prompt", action="append", metavar="TEXT", help="ask this instead of the built-in prompts; may be repeated")
    add("--tokens", type=int, default=48, metavar="N", help="how long each answer is (default: 48)")
    add("--keep", action="store_true", help="leave the servers running afterwards, until Ctrl-C")
    add("--log-dir", type=Path, metavar="DIR", help="where the logs go (default: logs/demo-DATE-TIME)")
    add("--timeout", type=float, default=600.0, metavar="S", help="how long the start may take (default: 600)")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import report, topology
    from afdpatch.cli.servers import ServerError

    model = find_model(args.model)
    refuse_stray_words(args.rest, "afdpatch demo --model MODEL")
    if args.tokens < 1:
        raise UsageError(f"--tokens {args.tokens}: expected 1 or more")
    log_dir = args.log_dir or Path("logs") / time.strftime("demo-%Y%m%d-%H%M%S")
    checks.make_log_dir(log_dir)
    reporter = report.TextReporter()
    options = [model, *OPTIONS, *args.rest]
    attention, ffn = topology.afd_pair(options, log_dir)
    # As many threads as the attention server has: another number of threads may round differently.
    stock = topology.stock(options, log_dir, binding=topology.core_binding(2)[0])
    servers = [attention, ffn, stock]
    reporter.print(f"model {model}: an attention server, an FFN server, and a stock vLLM beside them", "bold")
    for text in topology.describe_defaults(servers, options):
        reporter.event("note", text=text)
    reporter.event("note", text=f"logs: {log_dir}/")
    report.terminate_as_interrupt()
    reason = "the demo is over"
    try:
        report.bring_up(servers, args.timeout, reporter)
        code = show(args, model, servers, reporter)
        if args.keep:
            reporter.print(f"\nAFD {attention.url}/v1   stock {stock.url}/v1   Ctrl-C ends them")
            while True:
                for server in servers:
                    server.check()
                time.sleep(0.2)
        return code
    except ServerError:
        reason = "a server failed"
        return 1
    except KeyboardInterrupt:
        reason = "interrupted"
        return code if args.keep and "code" in locals() else 1
    finally:
        report.take_down(servers, reporter, reason)


def find_model(given: str | None) -> str:
    """The model that was asked for, or the one in the repository: here, or where this package's sources are."""
    if given:
        checks.check_model(given)
        return given
    for folder in (Path(MODEL), Path(__file__).resolve().parents[2] / MODEL):
        if (folder / "config.json").is_file():
            return str(folder)
    raise UsageError(
        f"expected the model {MODEL} here, found none; run it in the repository, or name one: --model MODEL"
    )


def refuse_stray_words(words: Sequence[str], usage: str) -> None:
    """Among vLLM's options, a word that is none and belongs to none: vLLM would say so much later, in a log."""
    if stray := checks.positionals(words):
        raise UsageError(f"unknown argument: {stray[0]}; a model is named so: {usage}")


def show(args: argparse.Namespace, model: str, servers: list[Server], reporter: TextReporter) -> int:
    """Ask, compare, and tell; returns the exit code."""
    from afdpatch.cli import client

    attention, ffn, stock = servers
    start = client.metrics(attention.url)
    count = len(args.prompt or PROMPTS)
    if not reporter.console.is_terminal:
        reporter.print(f"asking both sides, {count} prompt{'s' if count > 1 else ''} of {args.tokens} tokens")
    rounds = [Round(prompt) for prompt in args.prompt or PROMPTS]
    for number, round_ in enumerate(rounds, 1):
        ask_both(round_, [attention.url, stock.url], model, args.tokens, reporter.console)
        for name, error in zip(NAMES, round_.errors, strict=True):
            if error:
                reporter.print(f"error: {name}: {error}", "bold red")
        verdict = round_.verdict
        mark, style = ("✓", "green") if verdict.same else ("✗", "bold red")
        reporter.print(f"{mark} prompt {number} of {len(rounds)}: {verdict}", style)
    end = client.metrics(attention.url)
    # The two sides shared the cores until here: what AFD costs is read from one more answer, the stock server idle.
    before = [client.metrics(server.url) for server in (attention, ffn)]
    with contextlib.suppress(OSError, ValueError, LookupError):
        for _ in client.stream(attention.url, model, rounds[0].prompt, args.tokens):
            pass
        after = [client.metrics(server.url) for server in (attention, ffn)]
        reporter.console.print(cost_table(before, after, model))
    return conclude(rounds, start, end, reporter)


def ask_both(round_: Round, urls: list[str], model: str, tokens: int, console: Console) -> None:
    """Stream both answers at the same time; on a terminal they are shown as they grow, elsewhere at the end."""
    from rich.live import Live

    from afdpatch.cli import client

    def ask(side: int) -> None:
        try:
            for answer in client.stream(urls[side], model, round_.prompt, tokens):
                round_.answers[side] = answer
        except (OSError, ValueError, LookupError) as error:
            round_.errors[side] = str(error)

    threads = [threading.Thread(target=ask, args=(side,), daemon=True) for side in (0, 1)]
    for thread in threads:
        thread.start()
    if console.is_terminal:
        with Live(get_renderable=lambda: columns(round_), console=console, refresh_per_second=12):
            for thread in threads:
                thread.join()
    else:
        for thread in threads:
            thread.join()
        console.print(f"\n{round_.prompt!r} goes on", markup=False)
        for name, answer in zip(NAMES, round_.answers, strict=True):
            console.print(f"  {name:<28}{(answer.text if answer else '')!r}", markup=False)


def columns(round_: Round) -> RenderableType:
    """Both answers, side by side; from the first token on that differs in red."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, show_lines=False)
    differs_at = round_.verdict.differs_at if all(answer and answer.finish for answer in round_.answers) else None
    cells = []
    for name, answer in zip(NAMES, round_.answers, strict=True):
        tokens = answer.tokens if answer else []
        table.add_column(f"{name} ({len(tokens)} tokens)", ratio=1, overflow="fold")
        cell = Text(round_.prompt, style="dim")
        for position, token in enumerate(tokens):
            cell.append(token.text, "not dim red" if differs_at is not None and position >= differs_at else "not dim")
        cells.append(cell)
    table.add_row(*cells)
    return table


def cost_table(before: list[Metrics], after: list[Metrics], model: str) -> RenderableType:
    """What crossed between the two servers between the two readings, and what each holds."""
    from rich.table import Table

    from afdpatch.cli.client import total

    def grown(side: int, name: str, **labels: str) -> float:
        return (total(after[side], name, **labels) or 0.0) - (total(before[side], name, **labels) or 0.0)

    def per(value: float, count: float, scale: float = 1.0, unit: str = "") -> str:
        return f"{value / count * scale:,.2f}{unit}" if count else "no measurement"

    steps, hops = grown(0, "afd_step_seconds_count"), grown(0, "afd_hop_seconds_count")
    table = Table(title="One more answer, by the pair alone", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps (forwards of the model)", f"{steps:,.0f}")
    table.add_row("hops there and back, for a step", per(hops, steps))
    for text, way in (("to the FFN", "a2f"), ("to attention", "f2a")):
        sent = grown(0, "afd_payload_bytes_total", direction=way)
        table.add_row(f"bytes {text}, for a step", per(sent, steps))
    table.add_row("a step", per(grown(0, "afd_step_seconds_sum"), steps, 1e3, " ms"))
    table.add_row("  of it in hops", per(grown(0, "afd_hop_seconds_sum"), steps, 1e3, " ms"))
    table.add_row("a hop there and back", per(grown(0, "afd_hop_seconds_sum"), hops, 1e3, " ms"))
    computed = grown(1, "afd_ffn_compute_seconds_sum")
    table.add_row("  of it the FFN's own work", per(computed, grown(1, "afd_ffn_compute_seconds_count"), 1e3, " ms"))
    held = [total(side, "afd_weight_bytes") or 0.0 for side in after]
    for role, size in zip(("attention", "FFN"), held, strict=True):
        table.add_row(f"weights that the {role} server holds", f"{size / 1e6:,.2f} MB")
    files = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    if files:
        table.add_row("the checkpoint's files", f"{files / 1e6:,.2f} MB")
    return table


def conclude(rounds: list[Round], before: Metrics, after: Metrics, reporter: TextReporter) -> int:
    """The last line, and the exit code."""
    from afdpatch.cli.client import total

    verdicts = [round_.verdict for round_ in rounds]
    hops = (total(after, "afd_hops_total") or 0.0) - (total(before, "afd_hops_total") or 0.0)
    if any(error for round_ in rounds for error in round_.errors):
        reporter.print("An answer failed: nothing can be said about the rest.", "bold red")
        return 1
    if not hops:
        reporter.print("No hop was counted: the pair did not answer through its FFN server.", "bold red")
        return 1
    if not all(verdict.same for verdict in verdicts):
        reporter.print(f"{sum(not v.same for v in verdicts)} of {len(verdicts)} answers differ.", "bold red")
        return 1
    gap = max(verdict.logprob_gap for verdict in verdicts)
    also = "every log-probability too" if gap == 0 else f"log-probabilities differ by up to {gap:.2g}"
    tokens = sum(verdict.tokens for verdict in verdicts)
    reporter.print(f"Every token is the same ({tokens} of {tokens}), {also}, over {hops:,.0f} hops.", "bold green")
    return 0
