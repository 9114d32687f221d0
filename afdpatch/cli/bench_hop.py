"""`afdpatch bench hop`: the round trip of one hop between two processes, beside a bare TCP loopback.

What runs is what serves: `Route.hop` over a connector here, `FfnLoop` with a computation that does nothing in the other
process.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from afdpatch.cli.bench_report import Report, add_output, command, machine, print_table, tell
from afdpatch.cli.checks import at_least

if TYPE_CHECKING:
    from torch import Tensor

    from afdpatch.runtime.config import AfdConfig
    from afdpatch.runtime.protocol import Greeting

    Hop = Callable[["Tensor"], "Tensor"]

DESCRIPTION = """\
Measure the round trip of one hop, torch operation to torch operation, between two processes on a core each: over
shared memory as served, over shared memory without the spin before the sleep, over the connector tcp, and over a bare
TCP socket, which does nothing but send and receive. They take turns in short blocks, so that a noisy machine is noisy
for all of them."""
EPILOG = "Example: afdpatch bench hop --round-trips 5000 --format json --output hop.json"
HIDDEN = 2048
ROWS = (1, 4, 16, 64, 256)
PAUSES_US = (0, 300)
LENGTH = struct.Struct("<Q")
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Result:
    """One line of the table; times in microseconds a round trip."""

    transport: str
    pause_us: int
    rows: int
    payload_bytes: int
    round_trips: int
    p50_us: float
    p99_us: float
    min_us: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `hop`."""
    parser = subparsers.add_parser(
        "hop",
        help="round trip of one hop between two processes, without vLLM",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--round-trips", type=at_least(10), default=2000, metavar="N", help="for each line; default 2000"
    )
    parser.add_argument(
        "--pauses-us",
        type=at_least(0),
        nargs="+",
        default=list(PAUSES_US),
        metavar="US",
        help="time between two hops, as attention computes; longer than the spin, the peer sleeps; default "
        + " ".join(map(str, PAUSES_US)),
    )
    parser.add_argument(
        "--rows",
        type=at_least(1),
        nargs="+",
        default=list(ROWS),
        metavar="N",
        help=f"how many rows (tokens) a hop carries; default {' '.join(map(str, ROWS))}",
    )
    parser.add_argument(
        "--hidden", type=at_least(1), default=HIDDEN, help=f"width of a row in bfloat16; default {HIDDEN}"
    )
    parser.add_argument("--spin-us", type=at_least(0), default=None, help="default: as served")
    parser.add_argument(
        "--block", type=at_least(2), default=50, help="round trips of one transport in a turn; default 50"
    )
    add_output(parser, picture=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0, or 1 when a process of the measurement died."""
    from afdpatch.runtime.config import AfdConfig
    from afdpatch.runtime.connectors.base import ConnectorError

    spin_us = AfdConfig().spin_us if args.spin_us is None else args.spin_us
    attention_cores, ffn_cores = _cores()
    try:
        with _here(attention_cores), _transports(spin_us, max(args.rows), args.hidden, ffn_cores) as transports:
            results = _measure(transports, args)
    except (ConnectorError, OSError, EOFError) as error:
        print(f"afdpatch: error: bench hop: a process of the measurement has gone: {error}", file=sys.stderr)
        return 1
    report = {
        "command": command(),
        "machine": machine(),
        "attention_cores": sorted(attention_cores),
        "ffn_cores": sorted(ffn_cores),
        "hidden": args.hidden,
        "dtype": "bfloat16",
        "spin_us": spin_us,
        "results": [asdict(result) for result in results],
    }
    return tell(report, args, _print_table)


# Measuring


def _measure(transports: dict[str, Hop], args: argparse.Namespace) -> list[Result]:
    import torch

    results = []
    lines = [(pause_us, rows) for pause_us in args.pauses_us for rows in args.rows]
    with _progress(len(lines)) as show:
        for number, (pause_us, rows) in enumerate(lines):
            show(number, f"{_size(rows * args.hidden * 2)}, pause {pause_us} us")
            hidden = torch.randn(rows, args.hidden).bfloat16()
            taken: dict[str, list[int]] = {name: [] for name in transports}
            for name, hop in transports.items():
                if not torch.equal(hop(hidden), hidden):
                    raise OSError(f"{name}: what came back isn't what was sent")
                _block(hop, hidden, min(200, args.round_trips), 0)
            order = list(transports)
            while len(taken[order[0]]) < args.round_trips:
                for name in order:
                    taken[name] += _block(transports[name], hidden, args.block, pause_us * 1000)
                order.reverse()
            for name, times in taken.items():
                results.append(_result(name, pause_us, rows, hidden.nbytes, times[: args.round_trips]))
    return results


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Says on stderr which payload is measured: a bar on a terminal, else a line for each. Nothing runs in between."""
    if not sys.stderr.isatty():
        yield lambda done, what: print(f"bench hop: {done + 1} of {total}: {what}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Without the thread that redraws: it would take time from the hops.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("bench hop", total=total)
        yield lambda done, what: bar.update(task, completed=done, description=f"bench hop: {what}", refresh=True)


def _block(hop: Hop, hidden: Tensor, count: int, pause_ns: int) -> list[int]:
    """Times of ``count`` round trips in nanoseconds; one more goes first, as it finds a peer asleep."""
    hop(hidden)
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        until = clock() + pause_ns
        while clock() < until:  # attention computes: its core is busy, it doesn't sleep
            pass
        started = clock()
        hop(hidden)
        times.append(clock() - started)
    return times


def _result(name: str, pause_us: int, rows: int, payload: int, times: Sequence[int]) -> Result:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return Result(
        transport=name,
        pause_us=pause_us,
        rows=rows,
        payload_bytes=payload,
        round_trips=len(times),
        p50_us=round(cuts[49] / 1000, 1),
        p99_us=round(cuts[98] / 1000, 1),
        min_us=round(min(times) / 1000, 1),
    )


def _cores() -> tuple[set[int], set[int]]:
    """A core for each side where there are two; else both share what there is."""
    cores = sorted(os.sched_getaffinity(0))
    return ({cores[0]}, {cores[-1]}) if len(cores) > 1 else (set(cores), set(cores))


@contextlib.contextmanager
def _here(cores: set[int]) -> Iterator[None]:
    """This process on these cores, with one torch thread."""
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


# The transports


@contextlib.contextmanager
def _transports(spin_us: int, max_rows: int, width: int, cores: set[int]) -> Iterator[dict[str, Hop]]:
    """The hops, each with a process of its own at the other end."""
    with contextlib.ExitStack() as stack:
        yield {
            "shm": stack.enter_context(_served("shm", spin_us, max_rows, width, cores)),
            "shm, no spin": stack.enter_context(_served("shm", 0, max_rows, width, cores)),
            "tcp": stack.enter_context(_served("tcp", spin_us, max_rows, width, cores)),
            "bare TCP": stack.enter_context(_bare(max_rows, width, cores)),
        }


@contextlib.contextmanager
def _child(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """A spawned process with a pipe; it ends when the pipe does."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise OSError(f"the other process did not start within {START_TIMEOUT_S:.0f} s")
        yield ours
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _greeting(role: str, max_rows: int, width: int) -> Greeting:
    from afdpatch.runtime.protocol import Greeting

    return Greeting(
        role=role,
        rank=0,
        manifest_digest="bench",
        vllm_version="none",
        model="bench",
        config_digest="bench",
        checkpoint="bench",
        dtype="bfloat16",
        hidden_size=width,
        layers=(0,),
        max_rows=max_rows,
        micro_batches=1,
        num_attention_ranks=1,
        num_ffn_ranks=1,
    )


def _config(connector: str, port: int, spin_us: int) -> AfdConfig:
    from afdpatch.runtime.config import AfdConfig

    # For shm, host and port only name the socket.
    host = "127.0.0.1" if connector == "tcp" else f"bench-{port}-{spin_us}"
    extra = {"spin_us": spin_us}
    return AfdConfig.parse({"connector": connector, "host": host, "port": port, "connector_extra_config": extra})


@contextlib.contextmanager
def _served(connector: str, spin_us: int, max_rows: int, width: int, cores: set[int]) -> Iterator[Hop]:
    """A route to an FFN loop in another process."""
    from afdpatch.runtime.route import Route
    from afdpatch.runtime.status import StatusPage

    with socket.create_server(("127.0.0.1", 0)) as free:  # its number is nobody else's on this host
        port = free.getsockname()[1]
    config = _config(connector, port, spin_us)
    page = StatusPage.create("attention")
    route = Route(config, 0, page)
    with _child(_serve, connector, port, spin_us, max_rows, width, cores) as pipe:
        try:
            pipe.recv()
            route.connect(_greeting("attention", max_rows, width))
            route.wait_ready()
            yield lambda hidden: route.hop(hidden, 0)
        finally:
            route.close()
            page.close()


def _serve(
    pipe: Connection, connector: str, port: int, spin_us: int, max_rows: int, width: int, cores: set[int]
) -> None:
    import torch

    from afdpatch.runtime.connectors.factory import ffn_connector
    from afdpatch.runtime.ffn_loop import FfnLoop
    from afdpatch.runtime.status import StatusPage

    with _here(cores):
        page = StatusPage.create("ffn")
        served = ffn_connector(_config(connector, port, spin_us), 0, page)
        greeting = _greeting("ffn", max_rows, width)
        loop = FfnLoop(served, lambda layer, hidden: hidden, page, greeting, wrap=torch.inference_mode)
        loop.start()
        loop.serve()
        pipe.send("listening")
        _until_closed(pipe)
        loop.stop()


@contextlib.contextmanager
def _bare(max_rows: int, width: int, cores: set[int]) -> Iterator[Hop]:
    import torch

    answer = torch.empty(max_rows, width, dtype=torch.bfloat16)
    with (
        _child(_serve_bare, max_rows, width, cores) as pipe,
        socket.create_connection(("127.0.0.1", pipe.recv())) as sock,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def hop(hidden: Tensor) -> Tensor:
            _send_tensor(sock, hidden)
            return _receive_tensor(sock, answer).clone()

        yield hop


def _serve_bare(pipe: Connection, max_rows: int, width: int, cores: set[int]) -> None:
    import torch

    with _here(cores), socket.create_server(("127.0.0.1", 0)) as listener, torch.inference_mode():
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = torch.empty(max_rows, width, dtype=torch.bfloat16)
        with sock, contextlib.suppress(EOFError):
            while True:
                _send_tensor(sock, _receive_tensor(sock, received))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    import torch

    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _send_tensor(sock: socket.socket, tensor: Tensor) -> None:
    """Length and bytes in one call where the socket takes them, without a copy of ours."""
    payload = _bytes_of(tensor)
    sent = sock.sendmsg([LENGTH.pack(len(payload)), payload])
    if sent < LENGTH.size + len(payload):
        sock.sendall(payload[sent - LENGTH.size :])


def _receive_tensor(sock: socket.socket, buffer: Tensor) -> Tensor:
    """The rows that arrive, in ``buffer``."""
    head = bytearray(LENGTH.size)
    _fill(sock, memoryview(head))
    (length,) = LENGTH.unpack(head)
    _fill(sock, _bytes_of(buffer)[:length])
    return buffer[: length // (buffer.shape[1] * buffer.element_size())]


def _fill(sock: socket.socket, target: memoryview) -> None:
    while target:
        count = sock.recv_into(target)
        if not count:
            raise EOFError("the other process closed the connection")
        target = target[count:]


def _until_closed(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


# Reporting


def _print_table(report: Report) -> None:
    results = report["results"]
    names = list(dict.fromkeys(result["transport"] for result in results))
    machine = report["machine"]
    table = []
    for start in range(0, len(results), len(names)):
        line = results[start : start + len(names)]
        cells = [f"{result['p50_us']:.1f} / {result['p99_us']:.1f}" for result in line]
        table.append([str(line[0]["pause_us"]), _size(line[0]["payload_bytes"]), *cells])
    print_table(
        f"Round trip in microseconds, p50 / p99 of {results[0]['round_trips']}: {machine['cpu']}, "
        f"{machine['cores']} cores, hidden {report['hidden']}, bfloat16, spin {report['spin_us']} us",
        ("pause us", "payload", *names),
        table,
    )


def _size(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count / 1024:g} KB"
