"""`afdpatch bench hop-gpu` as far as it goes without GPUs: its cases, its table and picture from recorded figures."""

from __future__ import annotations

import argparse
import dataclasses
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
    args = parse("--forms", "plain", *arguments)
    lines = bench_hop_gpu.cases(args)
    assert len(lines) == 7 * len(args.rows) and len(set(map(repr, lines))) == len(lines)
    for case in lines[:: len(lines) // len(args.rows)]:
        assert case.replays * (case.hops - 1) * case.repeats >= args.round_trips
    assert not any("nccl" in case.transport for case in bench_hop_gpu.cases(parse("--no-nccl")))


@pytest.mark.parametrize("vllm", [False, True])
def test_every_form_stands_beside_the_plain_hop(monkeypatch: pytest.MonkeyPatch, vllm: bool) -> None:
    monkeypatch.setattr(bench_hop_gpu, "_vllm_norm", lambda: print if vllm else None)
    args = parse()
    lines = bench_hop_gpu.cases(args)
    assert len(set(map(repr, lines))) == len(lines)
    found = {(case.form, case.rows) for case in lines if case.graph and case.launches == 1 and case.overlap}
    norms = ["norm", "torch norm"] + ["vllm norm"] * vllm
    expected = {("fp8", rows) for rows in (1, 32, 128, 512, 2048, 8192)}
    expected |= {(form, rows) for form in norms for rows in (1, 8, 32, 64)}
    assert {key for key in found if key[0] != "plain"} == expected
    assert {rows for form, rows in found if form == "plain"} == {1, 8, 32, 64, 128, 512, 2048, 8192}
    for forms in (["fp8"], ["norm"], ["fp8", "norm"]):
        some = bench_hop_gpu.cases(parse("--forms", *forms))
        assert all(case.transport == "one-sided" and case.graph for case in some)
        plain = [case.rows for case in some if case.form == "plain"]
        assert sorted(plain) == sorted({case.rows for case in some if case.form != "plain"})
    wide = bench_hop_gpu.cases(parse("--forms", "norm", "--hidden", "7168"))
    assert {case.rows for case in wide} == {1, 8}  # more would not travel packed


def test_an_unknown_form_is_a_usage_error(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--forms", "fp4")
    assert caught.value.code == 2 and "invalid choice: 'fp4'" in capsys.readouterr().err


@pytest.mark.parametrize("forms", [["plain", "fp8", "norm"], ["fp8"], ["norm"]], ids="-".join)
def test_every_form_has_its_figures_in_a_table(
    monkeypatch: pytest.MonkeyPatch, forms: list[str], tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(bench_hop_gpu, "_vllm_norm", lambda: print)
    lines = bench_hop_gpu.cases(parse("--forms", *forms))
    results = [
        bench_hop_gpu.Result(case, 1, 100 + number + 0.25, [100 + number] * 2 + [101.0 + number], 9, 1.0, 2.0, 3.0, 32)
        for number, case in enumerate(lines)
    ]
    report = json.loads((RECORDED / "hop-gpu.json").read_text()) | {
        "results": json.loads(json.dumps([dataclasses.asdict(result) for result in results]))
    }
    bench_hop_gpu_report.print_table(report)
    text = capsys.readouterr().out
    for result in results:
        assert f" {result.p50_us:.2f} " in text, result.case
    assert ("8 bits" in text, "norm and hop in one" in text) == ("fp8" in forms, "norm" in forms)
    if "fp8" in forms:
        here = {case.form: 100 + number + 0.25 for number, case in enumerate(lines) if case.rows == 8192}
        assert f"{here['plain'] / here['fp8']:.2f}" in text
    assert max(map(len, text.splitlines())) <= 220
    pytest.importorskip("matplotlib")
    bench_hop_gpu_report.draw(report, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


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
