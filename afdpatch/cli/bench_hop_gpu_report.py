"""What `afdpatch bench hop-gpu` says: the machine, the table, the picture."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS_US = {1: 10, 8: 10, 32: 10, 512: 22}
"""To reach, by rows, at hidden 2048."""


def machine(devices: Sequence[int]) -> dict[str, object]:
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


def _rows_of(report: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """Results by rows and by the name of their column."""
    table: dict[int, dict[str, dict[str, Any]]] = {}
    for result in report["results"]:
        case = result["case"]
        name = case["transport"] + ("" if case["graph"] else ", eager")
        name += ", two launches" if case["launches"] == 2 else ""
        name += "" if case["overlap"] else ", no overlap"
        table.setdefault(case["rows"], {})[name] = result
    return table


def print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = _rows_of(report)
    names = list(dict.fromkeys(name for line in rows.values() for name in line))
    host = report["machine"]
    table = Table(
        title=f"Round trip in microseconds: {' and '.join(host['gpus'])}, hidden {report['hidden']}, bfloat16, "
        f"torch {host['torch']}, NCCL {host['nccl']}",
        title_justify="left",
    )
    for column in ("rows", *names, "hop p50 / p99", "p99 / p50", "NCCL / one-sided", "direct / one-sided"):
        table.add_column(column, justify="right")
    for count, line in rows.items():
        ours = line["one-sided"]
        cells = [f"{line[name]['p50_us']:.2f}" if name in line else "" for name in names]
        cells += [
            f"{ours['hop_p50_us']:.2f} / {ours['hop_p99_us']:.2f}",
            f"{ours['hop_p99_us'] / ours['hop_p50_us']:.2f}",
        ]
        for name in ("nccl", "nccl direct"):
            cells.append(f"{line[name]['p50_us'] / ours['p50_us']:.1f}" if name in line else "")
        table.add_row(str(count), *cells)
    Console(width=None if sys.stdout.isatty() else 220).print(table)


def draw(report: dict[str, Any], path: Path) -> None:
    """The graph lines over the number of rows, with the spread of the repeats and what was to be reached."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    lines = _rows_of(report)
    for name, colour in (
        ("nccl", "#b5651d"),
        ("nccl direct", "#d9a066"),
        ("one-sided, two launches", "#7a9cc6"),
        ("one-sided", "#1f4e8c"),
    ):
        points = [(rows, line[name]) for rows, line in lines.items() if name in line]
        if not points:
            continue
        x, y = [rows for rows, _ in points], [result["p50_us"] for _, result in points]
        low = [result["p50_us"] - min(result["repeats_us"]) for _, result in points]
        high = [max(result["repeats_us"]) - result["p50_us"] for _, result in points]
        label = {"nccl": "NCCL by torch.distributed", "nccl direct": "NCCL's own calls"}.get(name, name)
        axes.errorbar(x, y, yerr=(low, high), color=colour, marker="o", markersize=4, capsize=3, label=label)
        for a, b in zip(x, y, strict=True):
            axes.annotate(f"{b:.1f}", (a, b), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    axes.plot(list(TARGETS_US), list(TARGETS_US.values()), "_", color="#444444", markersize=14, label="to reach")
    axes.set(xscale="log", yscale="log", xlabel="rows (batch)", ylabel="round trip, us (CUDA graph, median)")
    axes.set_xticks(list(lines), [str(rows) for rows in lines])
    axes.set_xticks([], minor=True)
    axes.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes.set_title(f"A hop with an FFN that does nothing, hidden {report['hidden']}, bfloat16", fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
