"""`afdpatch up`: attention and FFN servers on this machine, watched over until Ctrl-C."""

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
Start attention and FFN servers for MODEL on this machine, one of each unless told otherwise, each on its own cores and
with its own log, wait until all answer, and watch over them. Ctrl-C ends all; when one ends by itself the others are
taken down too. Nothing stays behind, even when this process is killed.

MODEL and every option that isn't named below go to all servers (`afdpatch vllm serve --help` lists them).
"""

EPILOG = """\
examples:
  afdpatch up tests/models/qwen3-moe --port 8000 --enforce-eager --max-model-len 1024
  afdpatch up MODEL --attention 3 --ffn 2               3 attention servers at 8000 to 8002, 2 FFN servers behind them
  afdpatch up MODEL --attention-dp 2 --ffn 1            1 attention server with 2 data-parallel ranks
  afdpatch up MODEL --attention 2 --ffn 2 --dry-run     only print the commands
  afdpatch up MODEL --dry-run --hosts 10.0.0.1,10.0.0.2 --secret-file FILE    ... for one server on each host

on a CPU: this process's cores are divided between the workers (VLLM_CPU_OMP_THREADS_BIND, when set, is left alone), and
each server gets a KV cache of 1 GiB unless --kv-cache-memory-bytes or another of vLLM's settings says otherwise.

exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 a server ended or did not come up in time; 2 wrong usage.
"""

HEALTH_SECONDS = 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "up",
        help="start attention and FFN servers on this machine and watch over them",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch up MODEL [--port P] [options] [vLLM's options for both]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    add = parser.add_argument
    add("--attention", type=int, default=1, metavar="A", help="how many attention servers (default: 1)")
    add("--ffn", type=int, default=1, metavar="F", help="how many FFN servers (default: 1)")
    add("--attention-dp", type=int, default=1, metavar="N", help="data-parallel ranks of each attention server")
    add("--attention-tp", type=int, default=1, metavar="N", help="tensor-parallel size of each attention server")
    add("--ffn-tp", type=int, default=1, metavar="N", help="tensor-parallel size of each FFN server")
    add("--host", default="127.0.0.1", metavar="H", help="the address that all listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="P", help="the API's port; further attention servers: P + 1, ...")
    add("--ffn-port", type=int, metavar="Q", help="the FFN server's port: health, metrics (default: the next free one)")
    add("--afd-port", type=int, metavar="R", help="the port that names the pair (default: a free one)")
    add("--connector", metavar="NAME", help="shm (default) or tcp; on GPUs ipc or nccl")
    add("--secret-file", metavar="FILE", help="the secret that all servers must have")
    add("--hosts", metavar="H,...", help="with --dry-run: a host for each server, the attention servers' first (tcp)")
    add("--dry-run", action="store_true", help="print the servers' own commands, start nothing")
    add("--log-dir", type=Path, metavar="DIR", help="where the logs go (default: logs/up-DATE-TIME)")
    add("--attention-args", metavar="WORDS", help='options for the attention servers alone: --attention-args="..."')
    add("--ffn-args", metavar="WORDS", help='options for the FFN servers alone: --ffn-args="..."')
    add("--timeout", type=float, default=600.0, metavar="S", help="how long the start may take (default: 600)")
    add("--format", choices=("text", "json"), default="text", help="json: an event a line, for programs")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import report, topology
    from afdpatch.cli.servers import ServerError

    shape = check(args)
    own = [topology.split_words(args.attention_args), topology.split_words(args.ffn_args)]
    ports = topology.choose_ports(shape, args.port, args.ffn_port, look=not args.dry_run)
    meeting = meeting_of(args, shape, ports)
    log_dir = args.log_dir or Path("logs") / time.strftime("up-%Y%m%d-%H%M%S")
    servers = topology.afd_servers(
        args.rest,
        log_dir,
        shape,
        meeting,
        ports,
        host=args.host,
        attention_options=own[0],
        ffn_options=own[1],
        bindings=[{} for _ in shape.workers] if args.hosts else None,
    )
    meets = check_settings(servers)
    if args.dry_run:
        return show(servers, meeting)
    check_free(args, servers, meets)
    checks.make_log_dir(log_dir)
    reporter = report.make_reporter(args.format)
    for text in topology.describe_defaults(servers, args.rest):
        reporter.event("note", text=text)
    reporter.event("note", text="logs: " + "  ".join(str(server.log.path) for server in servers))

    def kill_all() -> None:
        for server in servers:
            server.request_stop()

    with report.Interrupt(again=kill_all) as interrupted:
        reason = "a server failed"
        try:
            report.bring_up(servers, args.timeout, reporter, interrupted)
            if not interrupted():
                announce(servers[: shape.attention], servers[shape.attention :], args, reporter)
                watch(servers, reporter, interrupted)
            reason = interrupted.name or reason
            return 0
        except ServerError:
            return 1
        finally:
            report.take_down(servers, reporter, reason)


def check(args: argparse.Namespace) -> Any:
    """Refuse what can't be done; the shape that is asked for."""
    from afdpatch.cli import topology

    for option in ("attention", "ffn", "attention_dp", "attention_tp", "ffn_tp"):
        if getattr(args, option) < 1:
            name = "--" + option.replace("_", "-")
            raise UsageError(f"{name} {getattr(args, option)}: expected at least 1")
    shape = topology.Shape(args.attention, args.ffn, args.attention_dp, args.attention_tp, args.ffn_tp)
    if not args.rest or args.rest[0].startswith("-"):
        raise UsageError("expected the model as the first argument: afdpatch up MODEL [options]")
    for option, port in (("--port", args.port), ("--ffn-port", args.ffn_port), ("--afd-port", args.afd_port)):
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"{option} {port}: expected 1 to 65535")
    if args.ffn_port is not None and args.port <= args.ffn_port < args.port + shape.attention:
        raise UsageError(f"--ffn-port {args.ffn_port}: an attention server has this port (--port); give another")
    for names, ours in (
        (("--tensor-parallel-size", "-tp"), "--attention-tp and --ffn-tp"),
        (("--data-parallel-size", "-dp"), "--attention-dp"),
    ):
        if any(checks.option_value(args.rest, name) is not None for name in names):
            raise UsageError(f"{names[0]}: the two roles have sizes of their own; give {ours}")
    if args.hosts and not args.dry_run:
        raise UsageError("--hosts: up starts servers on this machine only; add --dry-run to see each host's command")
    checks.check_model(args.rest[0], args.rest)
    return shape


def meeting_of(args: argparse.Namespace, shape: Any, ports: Sequence[int]) -> Any:
    """How the servers will find one another."""
    from afdpatch.cli import topology
    from afdpatch.cli.servers import free_port

    hosts = tuple(host.strip() for host in args.hosts.split(",")) if args.hosts else ()
    servers = shape.attention + shape.ffn
    if hosts and (len(hosts) != servers or not all(hosts)):
        raise UsageError(
            f"--hosts: found {len(hosts)} for {servers} servers; expected a host for each: the attention servers' "
            f"({shape.attention}) first, then the FFN servers' ({shape.ffn}); one may stand there more than once"
        )
    port = args.afd_port or (topology.AFD_PORT if args.dry_run else free_port(ports))
    return topology.Meeting(port, args.connector or ("tcp" if hosts else None), args.secret_file, hosts)


def check_settings(servers: Sequence[Any]) -> list[Any]:
    """Refuse `afd` settings that the servers would refuse; the settings of each."""
    from afdpatch.cli import serve

    found = []
    for server in servers:
        parser = argparse.ArgumentParser(add_help=False)
        serve.add_parser(parser.add_subparsers())
        args, rest = parser.parse_known_args(server.command[3:])
        checks.check_options(rest)
        afd = json.loads(serve.vllm_options(serve.afd_of(args), rest)[-1])["afd"]
        found.append(checks.check_afd(afd))
    return found


def check_free(args: argparse.Namespace, servers: Sequence[Any], meets: Sequence[Any]) -> None:
    """Refuse ports and meeting points that are taken."""
    for server, meet in zip(servers, meets, strict=True):
        option = "--port" if meet.role == "attention" else "--ffn-port"
        checks.check_port(option, server.port, server.host)
        if args.afd_port is not None and meet.role == "ffn":
            if meet.over_tcp:
                host, port = meet.ffn_address(meet.rank)
                checks.check_port("--afd-port", port, host)
            else:
                checks.check_meeting_point(meet.host, meet.port, meet.rank)


def show(servers: Sequence[Any], meeting: Any) -> int:
    """Print the servers' own commands, those of several hosts below their hosts."""
    from afdpatch.cli import topology

    for index, server in enumerate(servers):
        if meeting.hosts:
            alone = meeting.hosts.count(meeting.hosts[index]) == 1
            print(f"# on {meeting.hosts[index]}: {server.name}")
            # Alone on its host, a server needn't leave half of the cores to another one.
            prefix = f"{topology.BIND}=auto " if alone and topology.on_cpu() else ""
        else:
            prefix = ""
        print(prefix + topology.plain_command(server), flush=True)
    return 0


def announce(attentions: Sequence[Any], ffns: Sequence[Any], args: argparse.Namespace, reporter: Any) -> None:
    """Say where the servers are, and how to ask."""
    from afdpatch.cli import client

    attention = attentions[0]
    with contextlib.suppress(OSError, ValueError, LookupError):
        args.model_name = client.get_json(attention.url + "/v1/models")["data"][0]["id"]
    body = {"model": getattr(args, "model_name", args.rest[0]), "prompt": "The open function returns", "max_tokens": 32}
    curl = f"curl {attention.url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    lines = [
        *(("endpoint", server.url + "/v1") for server in attentions),
        ("try", curl),
        *(("metrics", f"{server.url}/metrics") for server in attentions),
        *(("FFN", f"{server.url}/health  {server.url}/metrics") for server in ffns),
        ("look", "afdpatch doctor " + " ".join(server.url for server in (*attentions, *ffns))),
    ]
    if args.format == "json":
        reporter.event(
            "serving",
            endpoint=attention.url + "/v1",
            curl=curl,
            attention=[server.url for server in attentions],
            ffn=[server.url for server in ffns],
            logs={server.name: str(server.log.path) for server in (*attentions, *ffns)},
        )
        return
    reporter.print()
    for label, text in lines:
        reporter.print(f"  {label:<9} {text}")
    reporter.print("\nCtrl-C ends them. Warnings, errors and rates from the logs:", "dim")


def report_more(server: Any, lines: int, reporter: Any) -> None:
    """Say how many lines of a server's log weren't passed on, if any."""
    if lines:
        reporter.event("more", server=server.name, lines=lines, log=str(server.log.path))


def watch(servers: Sequence[Any], reporter: Any, interrupted: Any) -> None:
    """Pass on warnings, errors, rates and health until interrupted. Raises ServerDied when a server ends."""
    from afdpatch.cli import report
    from afdpatch.cli.logs import Burst, throughput
    from afdpatch.cli.servers import POLL_SECONDS, ServerDied, get_status

    healthy = {server.name: True for server in servers}
    bursts = {server.name: Burst() for server in servers}
    look_at = time.monotonic() + HEALTH_SECONDS
    while not interrupted():
        for server in servers:
            ended = server.exit_code is not None  # before the log is read, so that its last lines are in it
            burst, now = bursts[server.name], time.monotonic()
            report_more(server, burst.held(now), reporter)
            for entry in server.log.new_lines():
                if entry.level in report.LEVEL_STYLES:
                    if not burst.admits(now):
                        continue
                    reporter.event("log", server=server.name, level=entry.level, text=entry.text)
                elif server.name.startswith("attention") and (rate := throughput(entry)):
                    reporter.event("rate", server=server.name, text=rate)
            if ended:
                report_more(server, burst.held(float("inf")), reporter)
                try:
                    server.check()
                except ServerDied as error:
                    report.report_failure(error, reporter)
                    raise
        if time.monotonic() > look_at:
            look_at = time.monotonic() + HEALTH_SECONDS
            for server in servers:
                status = get_status(server.host, server.port, server.health)
                if (status == 200) != healthy[server.name] and server.exit_code is None:
                    healthy[server.name] = status == 200
                    reporter.event("health", server=server.name, ok=status == 200, status=status)
        time.sleep(POLL_SECONDS)
