"""What the hop's and the token's measurements share: options, the machine, tables, lines over a number of rows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def add_output(parser: argparse.ArgumentParser, *, picture: bool) -> None:
    """The options of every measurement's result."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there too")
    if picture:
        parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (.svg or .png; needs matplotlib)")


def tell(
    report: Report,
    args: argparse.Namespace,
    table: Callable[[Report], None],
    draw: Callable[[Report, Path], None] | None = None,
) -> int:
    """Write and print a report as `add_output`'s options ask; 0."""
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    if draw is not None and args.picture:
        draw(report, args.picture)
    if args.format == "json":
        print(json.dumps(report, indent=2))
    else:
        table(report)
    return 0


def command() -> str:
    """This command as it was given."""
    return " ".join(["afdpatch", *sys.argv[1:]])


def machine() -> Report:
    """Processor and versions."""
    import torch

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def have_gpus(bench: str, devices: Sequence[int]) -> bool:
    """Whether this machine has both GPUs; says so on stderr where it hasn't."""
    import torch

    if (count := torch.cuda.device_count()) > max(devices):
        return True
    print(
        f"afdpatch: error: bench {bench}: expected GPUs {devices[0]} and {devices[1]}, found {count} GPUs; name others "
        f"with --devices",
        file=sys.stderr,
    )
    return False


def gpu_machine(devices: Sequence[int]) -> Report:
    """Date, GPUs and versions."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ""
    with contextlib.suppress(OSError):
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": [torch.cuda.get_device_name(device) for device in devices],
        "driver": driver,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def processor() -> str:
    """The processor's name, from /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of figures on stdout, as wide as it is where that is no terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 220).print(table)


@dataclass(frozen=True)
class Line:
    """A line of a picture: for each x the repeats' values, of which the median is the point."""

    label: str
    colour: str
    points: Mapping[int, tuple[float, Sequence[float]]]
    form: str = "{:.1f}"
    below: bool = False
    """Whether its values stand below the line."""


def draw_lines(
    path: Path,
    lines: Sequence[Line],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    yticks: Sequence[float],
    marks: Mapping[int, float] | None = None,
) -> None:
    """Lines over the number of rows, both axes logarithmic, with the spread of the repeats and what was to be reached.

    Args:
        path: ends in .svg or .png.
        yticks: the values that the y axis names.
        marks: what was to be reached, by x.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for line in lines:
        if not line.points:
            continue
        x, y = list(line.points), [middle for middle, _ in line.points.values()]
        low = [middle - min(repeats) for middle, repeats in line.points.values()]
        high = [max(repeats) - middle for middle, repeats in line.points.values()]
        axes.errorbar(x, y, yerr=(low, high), color=line.colour, marker="o", markersize=4, capsize=3, label=line.label)
        for a, b in zip(x, y, strict=True):
            place = (0, -14 if line.below else 6)
            text = line.form.format(b)
            axes.annotate(text, (a, b), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    if marks:
        axes.plot(list(marks), list(marks.values()), "_", color="#444444", markersize=14, label="to reach")
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    every = sorted({x for line in lines for x in line.points})
    axes.set_xticks(every, [str(x) for x in every])
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(yticks), [f"{tick:g}" for tick in yticks])
    axes.set_yticks([], minor=True)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
