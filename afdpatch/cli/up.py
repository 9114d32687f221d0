"""`afdpatch up`: an attention and an FFN server on this machine, watched over until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afdpatch.cli import UsageError, checks

DESCRIPTION = """\
Start an attention and an FFN server for MODEL on this machine, each on its own cores and with its own log, wait until
both answer, and watch over them. Ctrl-C ends both; when one ends by itself the other is taken down too. Nothing stays
behind, even when this process is killed.

MODEL and every option that isn't named below go to both servers (`afdpatch vllm serve --help` lists them).
"""

EPILOG = """\
example:
  afdpatch up tests/models/qwen3-moe --port 8000 --enforce-eager --max-model-len 1024

on a CPU: this process's cores are divided between the two (VLLM_CPU_OMP_THREADS_BIND, when set, is left alone), and
each gets a KV cache of 1 GiB unless --kv-cache-memory-bytes or another of vLLM's settings says otherwise.

exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 a server ended or did not come up in time; 2 wrong usage.
"""

HEALTH_SECONDS = 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "up",
        help="start an attention and an FFN server on this machine and watch over them",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch up MODEL [--port P] [options] [vLLM's options for both]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    add = parser.add_argument
    add("--attention", type=int, default=1, metavar="N", help="how many attention servers (only 1 for now)")
    add("--ffn", type=int, default=1, metavar="N", help="how many FFN servers (only 1 for now)")
    add("--host", default="127.0.0.1", metavar="H", help="the address that both listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="P", help="the attention server's port: the API (default: 8000)")
    add("--ffn-port", type=int, metavar="Q", help="the FFN server's port: health, metrics (default: P + 1 if free)")
    add("--afd-port", type=int, metavar="R", help="the port that names the pair (default: a free one)")
    add("--log-dir", type=Path, metavar="DIR", help="where the logs go (default: logs/up-DATE-TIME)")
    add("--attention-args", metavar="WORDS", help='options for the attention server alone: --attention-args="..."')
    add("--ffn-args", metavar="WORDS", help='options for the FFN server alone: --ffn-args="..."')
    add("--timeout", type=float, default=600.0, metavar="S", help="how long the start may take (default: 600)")
    add("--format", choices=("text", "json"), default="text", help="json: an event a line, for programs")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import report, topology
    from afdpatch.cli.servers import ServerError

    check(args)
    reporter = report.make_reporter(args.format)
    log_dir = args.log_dir or Path("logs") / time.strftime("up-%Y%m%d-%H%M%S")
    own = [topology.split_words(args.attention_args), topology.split_words(args.ffn_args)]
    check_free(args, *own)
    checks.make_log_dir(log_dir)
    pair = topology.afd_pair(
        args.rest,
        log_dir,
        port=args.port,
        ffn_port=args.ffn_port,
        afd_port=args.afd_port,
        host=args.host,
        attention_options=own[0],
        ffn_options=own[1],
    )
    for text in topology.describe_defaults(pair, args.rest):
        reporter.event("note", text=text)
    reporter.event("note", text=f"logs: {pair[0].log.path}  {pair[1].log.path}")

    def kill_all() -> None:
        for server in pair:
            server.request_stop()

    with report.Interrupt(again=kill_all) as interrupted:
        reason = "a server failed"
        try:
            report.bring_up(pair, args.timeout, reporter, interrupted)
            if not interrupted():
                announce(pair, args, reporter)
                watch(pair, reporter, interrupted)
            reason = interrupted.name or reason
            return 0
        except ServerError:
            return 1
        finally:
            report.take_down(pair, reporter, reason)


def check(args: argparse.Namespace) -> None:
    """Refuse what can't be done."""
    for option, count in (("--attention", args.attention), ("--ffn", args.ffn)):
        if count != 1:
            raise UsageError(f"{option} {count}: not supported yet, expected 1 (one attention and one FFN server)")
    if not args.rest or args.rest[0].startswith("-"):
        raise UsageError("expected the model as the first argument: afdpatch up MODEL [options]")
    for option, port in (("--port", args.port), ("--ffn-port", args.ffn_port), ("--afd-port", args.afd_port)):
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"{option} {port}: expected 1 to 65535")
    if args.port == args.ffn_port:
        raise UsageError(f"--ffn-port {args.ffn_port}: the attention server has this port (--port); give another")
    checks.check_model(args.rest[0], args.rest)


def check_free(args: argparse.Namespace, attention_options: Sequence[str], ffn_options: Sequence[str]) -> None:
    """Refuse `afd` settings that the servers would refuse, and ports and a meeting point that are taken."""
    from afdpatch.cli import serve, topology

    meet = None
    for role, own in (("attention", attention_options), ("ffn", ffn_options)):
        words = [*args.rest, *own]
        checks.check_options(words)
        # The pair's port is given to `serve` with this option, so another one among vLLM's options is a clash.
        afd = {"role": role, **({"port": args.afd_port} if args.afd_port is not None else {})}
        meet = checks.check_afd(json.loads(serve.vllm_options(afd, words)[-1])["afd"])
    host = topology.reachable(args.host)
    checks.check_port("--port", args.port, host)
    if args.ffn_port is not None:
        checks.check_port("--ffn-port", args.ffn_port, host)
    if args.afd_port is not None and meet is not None:
        checks.check_meeting_point(meet.host, meet.port)


def announce(pair: Any, args: argparse.Namespace, reporter: Any) -> None:
    """Say where the servers are, and how to ask."""
    from afdpatch.cli import client

    attention, ffn = pair
    with contextlib.suppress(OSError, ValueError, LookupError):
        args.model_name = client.get_json(attention.url + "/v1/models")["data"][0]["id"]
    body = {"model": getattr(args, "model_name", args.rest[0]), "prompt": "The open function returns", "max_tokens": 32}
    curl = f"curl {attention.url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    lines = [
        ("endpoint", attention.url + "/v1"),
        ("try", curl),
        ("metrics", f"{attention.url}/metrics"),
        ("FFN", f"{ffn.url}/health  {ffn.url}/metrics"),
    ]
    if args.format == "json":
        reporter.event(
            "serving",
            endpoint=attention.url + "/v1",
            curl=curl,
            attention=attention.url,
            ffn=ffn.url,
            logs={server.name: str(server.log.path) for server in pair},
        )
        return
    reporter.print()
    for label, text in lines:
        reporter.print(f"  {label:<9} {text}")
    reporter.print("\nCtrl-C ends both. Warnings, errors and rates from the logs:", "dim")


def watch(pair: Any, reporter: Any, interrupted: Any) -> None:
    """Pass on warnings, errors, rates and health until interrupted. Raises ServerDied when a server ends."""
    from afdpatch.cli import report
    from afdpatch.cli.logs import Burst, throughput
    from afdpatch.cli.servers import POLL_SECONDS, ServerDied, get_status

    healthy = {server.name: True for server in pair}
    bursts = {server.name: Burst() for server in pair}
    look_at = time.monotonic() + HEALTH_SECONDS
    while not interrupted():
        for server in pair:
            ended = server.exit_code is not None  # before the log is read, so that its last lines are in it
            burst, now = bursts[server.name], time.monotonic()
            if more := burst.held(float("inf") if ended else now):
                reporter.event("more", server=server.name, lines=more, log=str(server.log.path))
            for entry in server.log.new_lines():
                if entry.level in report.LEVEL_STYLES:
                    if not burst.admits(now):
                        continue
                    reporter.event("log", server=server.name, level=entry.level, text=entry.text)
                elif server is pair[0] and (rate := throughput(entry)):
                    reporter.event("rate", server=server.name, text=rate)
            if ended:
                try:
                    server.check()
                except ServerDied as error:
                    report.report_failure(error, reporter)
                    raise
        if time.monotonic() > look_at:
            look_at = time.monotonic() + HEALTH_SECONDS
            for server in pair:
                status = get_status(server.host, server.port, server.health)
                if (status == 200) != healthy[server.name] and server.exit_code is None:
                    healthy[server.name] = status == 200
                    reporter.event("health", server=server.name, ok=status == 200, status=status)
        time.sleep(POLL_SECONDS)
