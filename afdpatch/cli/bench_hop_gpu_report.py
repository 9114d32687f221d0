"""What `afdpatch bench hop-gpu` says: the table, the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afdpatch.cli.bench_report import Line, Report, draw_lines
from afdpatch.cli.bench_report import print_table as print_figures

TARGETS_US = {1: 10, 8: 10, 32: 10, 512: 22}
"""To reach, by rows, at hidden 2048."""
LINES = {
    "nccl": ("NCCL by torch.distributed", "#b5651d"),
    "nccl direct": ("NCCL's own calls", "#d9a066"),
    "one-sided, two launches": ("one-sided, two launches", "#7a9cc6"),
    "one-sided": ("one-sided", "#1f4e8c"),
}


def _rows_of(report: Report) -> dict[int, dict[str, dict[str, Any]]]:
    """Results by rows and by the name of their column."""
    table: dict[int, dict[str, dict[str, Any]]] = {}
    for result in report["results"]:
        case = result["case"]
        name = case["transport"] + ("" if case["graph"] else ", eager")
        name += ", two launches" if case["launches"] == 2 else ""
        name += "" if case["overlap"] else ", no overlap"
        table.setdefault(case["rows"], {})[name] = result
    return table


def print_table(report: Report) -> None:
    """One line for each number of rows."""
    rows = _rows_of(report)
    names = list(dict.fromkeys(name for line in rows.values() for name in line))
    host = report["machine"]
    table = []
    for count, line in rows.items():
        ours = line["one-sided"]
        cells = [str(count), *(f"{line[name]['p50_us']:.2f}" if name in line else "" for name in names)]
        cells += [
            f"{ours['hop_p50_us']:.2f} / {ours['hop_p99_us']:.2f}",
            f"{ours['hop_p99_us'] / ours['hop_p50_us']:.2f}",
        ]
        for name in ("nccl", "nccl direct"):
            cells.append(f"{line[name]['p50_us'] / ours['p50_us']:.1f}" if name in line else "")
        table.append(cells)
    print_figures(
        f"Round trip in microseconds: {' and '.join(host['gpus'])}, hidden {report['hidden']}, bfloat16, "
        f"torch {host['torch']}, NCCL {host['nccl']}",
        ("rows", *names, "hop p50 / p99", "p99 / p50", "NCCL / one-sided", "direct / one-sided"),
        table,
    )


def draw(report: Report, path: Path) -> None:
    """The graph lines over the number of rows."""
    rows = _rows_of(report)
    lines = [
        Line(
            label,
            colour,
            {count: (line[name]["p50_us"], line[name]["repeats_us"]) for count, line in rows.items() if name in line},
        )
        for name, (label, colour) in LINES.items()
    ]
    draw_lines(
        path,
        lines,
        title=f"A hop with an FFN that does nothing, hidden {report['hidden']}, bfloat16",
        xlabel="rows (batch)",
        ylabel="round trip, us (CUDA graph, median)",
        yticks=(5, 10, 20, 50, 100),
        marks=TARGETS_US,
    )
