"""`afdpatch bench hop-gpu` as far as it goes without GPUs: its cases, its table and picture from recorded figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from afdpatch.cli import bench_hop_gpu, bench_hop_gpu_report

RECORDED = Path(__file__).parents[2] / "docs" / "gpu"


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_hop_gpu.add_parser(parser.add_subparsers())
    return parser.parse_args(["hop-gpu", *arguments])


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--repeats", "2"], ["--round-trips", "x"], ["--hops", "1"]])
def test_wrong_numbers_are_a_usage_error(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2 and "expected an integer of at least" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--round-trips", "1000"], ["--hops", "7", "--repeats", "3"]])
def test_a_line_has_the_hops_that_were_asked_for(arguments: list[str]) -> None:
    args = parse(*arguments)
    lines = bench_hop_gpu.cases(args)
    assert len(lines) == 7 * len(args.rows) and len(set(map(repr, lines))) == len(lines)
    for case in lines[:: len(lines) // len(args.rows)]:
        assert case.replays * (case.hops - 1) * case.repeats >= args.round_trips
    assert not any("nccl" in case.transport for case in bench_hop_gpu.cases(parse("--no-nccl")))


def test_without_two_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse().run(parse()) == 1
    assert "expected GPUs 0 and 1, found 1 GPUs; name others with --devices" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(RECORDED.glob("hop-gpu*.json")), ids=lambda file: file.stem)
def test_recorded_figures_make_a_table_and_a_picture(file: Path, tmp_path: Path, capsys: Any) -> None:
    report = json.loads(file.read_text())
    bench_hop_gpu_report.print_table(report)
    text = capsys.readouterr().out
    for result in report["results"]:
        assert f"{result['p50_us']:.2f}" in text
    pytest.importorskip("matplotlib")
    bench_hop_gpu_report.draw(report, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_the_recorded_figures_are_those_of_the_page() -> None:
    report = json.loads((RECORDED / "hop-gpu.json").read_text())
    page = (RECORDED.parent / "gpu-hop.md").read_text()
    for result in report["results"]:
        case = result["case"]
        if case["transport"] == "one-sided" and case["graph"] and case["launches"] == 1 and case["overlap"]:
            assert f"\n| {case['rows']} | {result['p50_us']:.2f} |" in page
            assert f"| {result['hop_p99_us']:.2f} | {result['hop_p99_us'] / result['hop_p50_us']:.2f} |" in page
