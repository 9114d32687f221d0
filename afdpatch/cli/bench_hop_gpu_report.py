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
    "one-sided, fp8": ("one-sided, fp8 there", "#2e8b57"),
}
NORMS = {
    "one-sided, norm": "norm and hop in one",
    "one-sided, vllm norm": "vLLM's norm, hop",
    "one-sided, torch norm": "torch's add, norm, hop",
}


def _rows_of(report: Report) -> dict[int, dict[str, dict[str, Any]]]:
    """Results by rows and by the name of their column."""
    table: dict[int, dict[str, dict[str, Any]]] = {}
    for result in report["results"]:
        case = result["case"]
        name = case["transport"] + ("" if case["graph"] else ", eager")
        name += ", two launches" if case["launches"] == 2 else ""
        name += "" if case["overlap"] else ", no overlap"
        form = case.get("form", "plain")  # older records have no others
        name += "" if form == "plain" else f", {form}"
        table.setdefault(case["rows"], {})[name] = result
    return table


def print_table(report: Report) -> None:
    """One line for each number of rows: the plain hop, then the forms, each beside it."""
    rows = _rows_of(report)
    host = report["machine"]
    title = f"{' and '.join(host['gpus'])}, hidden {report['hidden']}, bfloat16, torch {host['torch']}"
    forms = {"one-sided, fp8", *NORMS}
    plain = {count: line for count, line in rows.items() if set(line) - forms - {"one-sided"} or not forms & set(line)}
    if plain:
        _print_plain(plain, f"Round trip in microseconds: {title}, NCCL {host['nccl']}")
    fp8 = {count: line for count, line in sorted(rows.items()) if "one-sided, fp8" in line}
    if fp8:
        print_figures(
            f"Rows sent in 8 bits with scales, replies as they are; round trip in microseconds: {title}",
            ("rows", "plain", "fp8", "plain / fp8", "fp8, hop p50 / p99"),
            [
                [
                    str(count),
                    _time(line, "one-sided"),
                    _time(line, "one-sided, fp8"),
                    _ratio(line, "one-sided", "one-sided, fp8"),
                    _tail(line["one-sided, fp8"]),
                ]
                for count, line in fp8.items()
            ],
        )
    norms = {count: line for count, line in sorted(rows.items()) if NORMS.keys() & line.keys()}
    names = [name for name in NORMS if any(name in line for line in norms.values())]
    if norms:
        print_figures(
            f"A norm, then a hop; round trip and norm in microseconds: {title}",
            ("rows", "hop alone", *(NORMS[name] for name in names), *(f"{NORMS[name]} / in one" for name in names[1:])),
            [
                [
                    str(count),
                    *(_time(line, name) for name in ("one-sided", *names)),
                    *(_ratio(line, name, names[0]) for name in names[1:]),
                ]
                for count, line in norms.items()
            ],
        )


def _print_plain(rows: dict[int, dict[str, dict[str, Any]]], title: str) -> None:
    names = list(
        dict.fromkeys(name for line in rows.values() for name in line if name not in {"one-sided, fp8", *NORMS})
    )
    table = []
    for count, line in rows.items():
        ours = line["one-sided"]
        cells = [str(count), *(_time(line, name) for name in names), _tail(ours)]
        cells.append(f"{ours['hop_p99_us'] / ours['hop_p50_us']:.2f}")
        cells += [_ratio(line, name, "one-sided", ".1f") for name in ("nccl", "nccl direct")]
        table.append(cells)
    columns = ("rows", *names, "hop p50 / p99", "p99 / p50", "NCCL / one-sided", "direct / one-sided")
    print_figures(title, columns, table)


def _time(line: dict[str, dict[str, Any]], name: str) -> str:
    return f"{line[name]['p50_us']:.2f}" if name in line else ""


def _ratio(line: dict[str, dict[str, Any]], name: str, to: str, form: str = ".2f") -> str:
    return format(line[name]["p50_us"] / line[to]["p50_us"], form) if name in line and to in line else ""


def _tail(result: dict[str, Any]) -> str:
    return f"{result['hop_p50_us']:.2f} / {result['hop_p99_us']:.2f}"


def draw(report: Report, path: Path) -> None:
    """The graph lines over the number of rows."""
    rows = _rows_of(report)
    lines = [
        Line(
            label,
            colour,
            {count: (line[name]["p50_us"], line[name]["repeats_us"]) for count, line in rows.items() if name in line},
            below=name == "one-sided, fp8",
        )
        for name, (label, colour) in LINES.items()
    ]
    draw_lines(
        path,
        lines,
        title=f"A hop with an FFN that does nothing, hidden {report['hidden']}, bfloat16",
        xlabel="rows (batch)",
        ylabel="round trip, us (CUDA graph, median)",
        yticks=(5, 10, 20, 50, 100, 200),
        marks=TARGETS_US,
    )
