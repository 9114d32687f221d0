"""`afdpatch bench hop-gpu`: the round trip of a hop between two GPUs of one host, beside NCCL's send and receive.

What runs are the launches that serve, `afdpatch.kernels.HopBuffers`, in a process for each side. The FFN does nothing,
so what comes back is what was sent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from afdpatch.cli.bench_report import add_output, command, gpu_machine, tell
from afdpatch.cli.checks import at_least
from afdpatch.cli.servers import free_port

if TYPE_CHECKING:
    import torch

    from afdpatch.kernels import HopBuffers
    from afdpatch.kernels.nccl import NcclBuffers

DESCRIPTION = """\
Measure the round trip of a hop between two GPUs of one host, with an FFN that does nothing: by one-sided writes as
served, in a CUDA graph and eager, and by NCCL send and receive in the same run. A graph has many hops; its time over
their number is one sample. For the one-sided hop the GPU's clock is noted after each reply too, for the tail."""
EPILOG = "Example: afdpatch bench hop-gpu --output hop-gpu.json --picture hop-gpu.svg"
ROWS = (1, 8, 32, 64, 128, 512)
START_TIMEOUT_S = 300.0
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Case:
    """One line: how `rows` rows travel."""

    transport: str
    """"one-sided", "nccl" (torch.distributed) or "nccl direct" (NCCL's own calls)."""
    rows: int
    graph: bool = True
    launches: int = 1
    """Of the attention side for a hop: 1 sends and receives at once, 2 one after the other."""
    overlap: bool = True
    hops: int = 100
    replays: int = 200
    repeats: int = 5
    tuning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a case took, in microseconds a round trip; the last three from the GPU's clock after each reply."""

    case: Case
    payload_bytes: int
    p50_us: float
    """Median over the repeats of each repeat's median."""
    repeats_us: list[float]
    hops: int = 0
    hop_p50_us: float | None = None
    hop_p99_us: float | None = None
    hop_p999_us: float | None = None
    clock_step_ns: int | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `hop-gpu`."""
    parser = subparsers.add_parser(
        "hop-gpu",
        help="round trip of one hop between two GPUs, beside NCCL",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=list(ROWS), metavar="ROWS")
    parser.add_argument("--hidden", type=at_least(8), default=2048, help="width of a row in bfloat16; default 2048")
    parser.add_argument(
        "--round-trips", type=at_least(1000), default=100_000, metavar="N", help="for each line; default 100000"
    )
    parser.add_argument("--repeats", type=at_least(3), default=5, help="that they are divided into; default 5")
    parser.add_argument("--hops", type=at_least(2), default=100, help="in a graph; default 100")
    parser.add_argument(
        "--devices",
        type=at_least(0),
        nargs=2,
        default=[0, 1],
        metavar="GPU",
        help="attention's and FFN's; default 0 1",
    )
    parser.add_argument("--no-nccl", action="store_true", help="leave out NCCL")
    add_output(parser, picture=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0, or 1 when a process of the measurement died or there are no two GPUs."""
    import torch

    from afdpatch.cli.bench_hop_gpu_report import draw, print_table

    if torch.cuda.device_count() <= max(args.devices):
        print(
            f"afdpatch: error: bench hop-gpu: expected GPUs {args.devices[0]} and {args.devices[1]}, found "
            f"{torch.cuda.device_count()} GPUs; name others with --devices",
            file=sys.stderr,
        )
        return 1
    try:
        results = measure(cases(args), args.hidden, args.devices)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        print(f"afdpatch: error: bench hop-gpu: {error}", file=sys.stderr)
        return 1
    report = {
        "command": command(),
        "machine": gpu_machine(args.devices),
        "hidden": args.hidden,
        "dtype": "bfloat16",
        "results": [asdict(result) for result in results],
    }
    return tell(report, args, print_table, draw)


def cases(args: argparse.Namespace) -> list[Case]:
    """The lines of the table, NCCL's with a tenth of the hops."""
    replays = max(3, -(-args.round_trips // (args.repeats * (args.hops - 1))))
    one: dict[str, Any] = {"hops": args.hops, "repeats": args.repeats}
    lines: list[Case] = []
    for rows in args.rows:
        lines += [
            Case("one-sided", rows, replays=replays, **one),
            Case("one-sided", rows, launches=2, replays=replays // 10 + 1, **one),
            Case("one-sided", rows, overlap=False, replays=replays // 10 + 1, **one),
            Case("one-sided", rows, graph=False, replays=replays // 20 + 1, **one),
        ]
        if not args.no_nccl:
            lines += [Case("nccl", rows, graph=graph, replays=replays // 10 + 1, **one) for graph in (True, False)]
            lines.append(Case("nccl direct", rows, replays=replays // 10 + 1, **one))
    return lines


# Measuring


def measure(lines: Sequence[Case], hidden: int, devices: Sequence[int]) -> list[Result]:
    """Each case between this process and a child, one after the other.

    Raises:
        OSError, EOFError: the child died.
        RuntimeError: a hop failed, or what came back isn't what was sent.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    port = free_port()
    child = spawn.Process(target=_answer, args=(theirs, list(lines), hidden, devices[1], port), daemon=True)
    child.start()
    theirs.close()
    try:
        return [_Side(True, ours, case, hidden, devices[0], port).measured() for case in lines]
    finally:
        ours.close()
        child.join(30)
        if child.is_alive():
            child.kill()
            child.join()


def _answer(pipe: Connection, lines: list[Case], hidden: int, device: int, port: int) -> None:
    with contextlib.suppress(EOFError):
        for case in lines:
            _Side(False, pipe, case, hidden, device, port).measured()


class _Side:
    """One process's part in a case."""

    def __init__(self, first: bool, pipe: Connection, case: Case, hidden: int, device: int, port: int) -> None:
        import torch

        self.first, self.pipe, self.case, self.port = first, pipe, case, port
        self.device = torch.device("cuda", device)
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        # NCCL would keep the addresses of a captured graph's tensors beyond the case.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.cuda.set_device(self.device)
        self.sent = torch.randn(case.rows, hidden, device=self.device).bfloat16()
        self.out = torch.full_like(self.sent, float("nan"))

    def measured(self) -> Result:
        """Run the case; the first side's result is the measurement."""
        import torch

        with self._hops() as (hops, buffers), torch.inference_mode():
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                hops()
                stream.synchronize()
                step = hops
                if self.case.graph:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        hops()
                    step = graph.replay
                self._meet()
                for _ in range(3):
                    step()
                stream.synchronize()
                result = self._timed(step, buffers)
            if self.first and not torch.equal(self.out if buffers is None else self.received, self.sent):
                raise RuntimeError(f"{self.case}: what came back isn't what was sent")
        return result

    def _timed(self, step: Callable[[], object], buffers: HopBuffers | None) -> Result:
        import torch

        case = self.case
        counted = case.replays * case.hops
        medians, gaps = [], []
        for _ in range(case.repeats):
            event_of: Any = torch.cuda.Event
            events = [event_of(enable_timing=True) for _ in range(case.replays + 1)]
            self._meet()
            events[0].record()
            for event in events[1:]:
                step()
                event.record()
            torch.cuda.current_stream().synchronize()
            if buffers is not None and buffers.status().code:
                raise RuntimeError(f"{case}: {buffers.status()}")
            times = [a.elapsed_time(b) * 1000 / case.hops for a, b in itertools.pairwise(events)]
            medians.append(statistics.median(times))
            if self.first and buffers is not None:
                # The trace is a ring with an entry for each hop of the repeat: in the order of time they are its hops.
                clock = self.times.cpu().sort().values.view(case.replays, case.hops)
                gaps.append((clock[:, 1:] - clock[:, :-1]).flatten())
        self._meet()
        payload = self.sent.nbytes
        middle = round(statistics.median(medians), 2)
        rounded = [round(median, 2) for median in medians]
        if not gaps:
            return Result(case, payload, middle, rounded, counted * case.repeats)
        hop = torch.cat(gaps).double()
        p50, p99, p999 = (
            round(float(value) / 1000, 2) for value in hop.quantile(torch.tensor([0.5, 0.99, 0.999]).double())
        )
        steps = sorted(set(hop.tolist()))
        step_ns = int(min((b - a for a, b in itertools.pairwise(steps)), default=0))
        return Result(case, payload, middle, rounded, hop.numel(), p50, p99, p999, step_ns)

    def _meet(self) -> None:
        """Both sides are here."""
        self.pipe.send(b"")
        if not self.pipe.poll(START_TIMEOUT_S):
            raise OSError(f"the other process did not answer within {START_TIMEOUT_S:.0f} s")
        self.pipe.recv()

    @contextlib.contextmanager
    def _hops(self) -> Iterator[tuple[Callable[[], None], HopBuffers | None]]:
        """What puts the case's hops into the current stream."""
        if self.case.transport != "one-sided":
            yield self._direct() if self.case.transport == "nccl direct" else self._nccl(), None
            return
        import torch

        from afdpatch.kernels import HopBuffers
        from afdpatch.kernels.layout import Geometry

        case, sent = self.case, self.sent
        geometry = Geometry(case.rows, sent.shape[1], "bfloat16", 1, **case.tuning)
        buffers = HopBuffers.create(
            0,
            0,
            "",
            0,
            self.device,
            initiator=self.first,
            deadline_s=DEADLINE_S,
            overlap=case.overlap,
            geometry=geometry,
        )
        self.pipe.send(buffers.handle())
        if not self.pipe.poll(START_TIMEOUT_S):
            raise OSError("the other process did not send its handle")
        buffers.open(self.pipe.recv())
        if self.first:
            self.times = torch.zeros(case.replays * case.hops, dtype=torch.int64, device=self.device)
            buffers.trace(self.times)

        def attention() -> None:
            for layer in range(case.hops):
                if case.launches == 1:
                    received = buffers.exchange(sent, layer)
                else:
                    buffers.send(sent, layer)
                    received = buffers.receive(case.rows, layer)
            self.received = received

        def ffn() -> None:
            for layer in range(case.hops):
                buffers.send(buffers.receive(case.rows, layer), layer)

        yield (attention if self.first else ffn), buffers
        buffers.disconnect()
        self._meet()
        buffers.close()

    def _direct(self) -> Callable[[], None]:
        nccl = _communicator(self.first, self.pipe, self.device, self.sent.shape[1])

        def hops() -> None:
            for layer in range(self.case.hops):
                if self.first:
                    nccl.send(self.sent, layer)
                nccl.receive(self.case.rows, layer, out=self.out)
                if not self.first:
                    nccl.send(self.out, layer)

        return hops

    def _nccl(self) -> Callable[[], None]:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                "nccl",
                init_method=f"tcp://127.0.0.1:{self.port}",
                rank=0 if self.first else 1,
                world_size=2,
                device_id=self.device,
            )

        def attention() -> None:
            for _ in range(self.case.hops):
                dist.send(self.sent, 1)
                dist.recv(self.out, 1)

        def ffn() -> None:
            for _ in range(self.case.hops):
                dist.recv(self.out, 0)
                dist.send(self.out, 0)

        return attention if self.first else ffn


@functools.cache
def _communicator(first: bool, pipe: Connection, device: torch.device, hidden: int) -> NcclBuffers:
    """What the connector `nccl` hops through, made at the first call in this process."""
    from afdpatch.kernels.nccl import NcclBuffers

    # No rows of its own: a case receives into its own tensor.
    buffers = NcclBuffers.create(0, hidden, "bfloat16", 1, device, initiator=first, deadline_s=DEADLINE_S)
    if first:
        name = buffers.handle()
        pipe.send_bytes(name)
    elif pipe.poll(START_TIMEOUT_S):
        name = pipe.recv_bytes()
    else:
        raise OSError("the other process did not send its communicator's name")
    buffers.open(name)
    buffers.join(time.monotonic() + START_TIMEOUT_S)
    return buffers
