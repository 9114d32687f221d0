"""`afdpatch bench hop-gpu`: the round trip of a hop between two GPUs of one host, beside NCCL's send and receive.

What runs are the launches that serve, `afdpatch.kernels.HopBuffers`, in a process for each side. The FFN does nothing,
so what comes back is what was sent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
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

from afdpatch.cli.bench_report import add_output, command, gpu_machine, have_gpus, tell
from afdpatch.cli.checks import at_least
from afdpatch.cli.servers import free_port

if TYPE_CHECKING:
    import torch

    from afdpatch.kernels import HopBuffers
    from afdpatch.kernels.nccl import NcclBuffers

DESCRIPTION = """\
Measure the round trip of a hop between two GPUs of one host, with an FFN that does nothing: by one-sided writes as
served, in a CUDA graph and eager, and by NCCL send and receive in the same run. A graph has many hops; its time over
their number is one sample. For the one-sided hop the GPU's clock is noted after each reply too, for the tail.
The forms, in graphs and each beside the plain hop: fp8 sends 8-bit numbers with scales and has the rows themselves
come back; norm adds a residual and sends the norm, in one launch, and as torch's and vLLM's launches before a hop."""
EPILOG = "Example: afdpatch bench hop-gpu --output hop-gpu.json --picture hop-gpu.svg"
ROWS = (1, 8, 32, 64, 128, 512)
FORMS = ("plain", "fp8", "norm")
FP8_ROWS = (1, 32, 128, 512, 2048, 8192)
NORM_ROWS = (1, 8, 32, 64)
EPS = 1e-6
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
    form: str = "plain"
    """"plain", "fp8", "norm" (one launch), or "torch norm" and "vllm norm": launches of theirs, then the hop."""


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
    parser.add_argument(
        "--rows", type=at_least(1), nargs="+", default=list(ROWS), metavar="ROWS", help="of the plain hop"
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=FORMS,
        default=list(FORMS),
        help=f"what to measure; default all. fp8 has {', '.join(map(str, FP8_ROWS))} rows, norm has "
        f"{', '.join(map(str, NORM_ROWS))}, without those that don't travel packed",
    )
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
    from afdpatch.cli.bench_hop_gpu_report import draw, print_table

    if not have_gpus("hop-gpu", args.devices):
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
    """The lines of the tables, NCCL's and those of many rows with a tenth of the hops."""
    replays = max(3, -(-args.round_trips // (args.repeats * (args.hops - 1))))
    one: dict[str, Any] = {"hops": args.hops, "repeats": args.repeats}
    lines: list[Case] = []
    for rows in args.rows if "plain" in args.forms else ():
        lines += [
            Case("one-sided", rows, replays=replays, **one),
            Case("one-sided", rows, launches=2, replays=replays // 10 + 1, **one),
            Case("one-sided", rows, overlap=False, replays=replays // 10 + 1, **one),
            Case("one-sided", rows, graph=False, replays=replays // 20 + 1, **one),
        ]
        if not args.no_nccl:
            lines += [Case("nccl", rows, graph=graph, replays=replays // 10 + 1, **one) for graph in (True, False)]
            lines.append(Case("nccl direct", rows, replays=replays // 10 + 1, **one))
    beside = {case.rows for case in lines}
    norms = ["norm", "torch norm", *(["vllm norm"] if _vllm_norm() else [])]
    for form, counts, names in (("fp8", FP8_ROWS, ["fp8"]), ("norm", NORM_ROWS, norms)):
        for rows in counts if form in args.forms else ():
            if form == "norm" and not _packed(rows, args.hidden):
                continue
            for name in names if rows in beside else ["plain", *names]:
                lines.append(
                    Case("one-sided", rows, form=name, replays=replays // 10 + 1 if rows > 512 else replays, **one)
                )
            beside.add(rows)
    return lines


def _packed(rows: int, hidden: int) -> bool:
    """Whether so many rows of bfloat16 travel packed, as those of a fused norm must."""
    from afdpatch.kernels.layout import Geometry

    return rows * hidden * 2 <= Geometry.packed_limit


def _vllm_norm() -> Callable[..., None] | None:
    """vLLM's own kernel, of its extension: (hidden, residual, weight, eps) in place; None where there is none."""
    import torch

    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("vllm._C_stable_libtorch")
    return getattr(torch.ops._C, "fused_add_rms_norm", None)


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
        self.residual = torch.randn_like(self.sent)
        self.weight = 1 + torch.randn_like(self.sent[0]) / 4

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
            if self.first:
                self._compare(self.out if buffers is None else self.received)
        return result

    def _compare(self, received: torch.Tensor) -> None:
        """Hold what came back last against what was sent.

        Raises:
            RuntimeError: it is something else.
        """
        import torch

        from afdpatch.kernels import reference

        sent, form = self.sent, self.case.form
        if form == "fp8":
            equal = torch.equal(
                received.cpu(), reference.dequantise(reference.quantise(sent.cpu()), sent.shape[1], sent.dtype)
            )
        elif form == "norm":
            # The sum from which the norm was made has been rounded since: the residual.
            normed, _ = reference.norm(torch.zeros_like(sent), self.residual, self.weight, EPS)
            equal = torch.allclose(received, normed, rtol=0.03, atol=0.03)
        else:
            equal = torch.equal(received, self.normed if form.endswith("norm") else sent)
        if not equal:
            raise RuntimeError(f"{self.case}: what came back isn't what was sent")

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
        wire = "float8_e4m3fn" if case.form == "fp8" else ""
        geometry = Geometry(case.rows, sent.shape[1], "bfloat16", 1, wire=wire, **case.tuning)
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

        normed = self._norm()

        def attention() -> None:
            for layer in range(case.hops):
                if case.form == "norm":
                    received = buffers.exchange_norm(sent, self.residual, self.weight, EPS, layer)
                elif case.launches == 1:
                    received = buffers.exchange(normed(), layer)
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

    def _norm(self) -> Callable[[], torch.Tensor]:
        """What makes a hop's rows, by launches of its own where the case has them."""
        import torch

        if self.case.form == "torch norm":

            def torch_norm() -> torch.Tensor:
                self.residual.add_(self.sent)
                self.normed = torch.nn.functional.rms_norm(self.residual, self.weight.shape, self.weight, EPS)
                return self.normed

            return torch_norm
        fused = _vllm_norm() if self.first and self.case.form == "vllm norm" else None
        if fused is not None:
            kernel, self.normed = fused, self.sent.clone()

            def vllm_norm() -> torch.Tensor:
                # In place: each hop's norm is the next one's input, whose values don't matter to the time.
                kernel(self.normed, self.residual, self.weight, EPS)
                return self.normed

            return vllm_norm
        return lambda: self.sent

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
