"""`afdpatch bench tpot` without GPUs: its turns and figures with made-up engines, its model, its table and picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli import UsageError, bench_tpot
from afdpatch.cli.bench_tpot import Engine, EngineLost

ROOT = Path(__file__).parents[2]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_tpot.add_parser(parser.add_subparsers())
    return parser.parse_args(["tpot", "--model", "m", *arguments])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(bench_tpot, "ENGINE", "tests.kernels.bench_stand_in")
    with ExitStack() as stack:

        def make(name: str, model: str = "m") -> Engine:
            spec = {"model": model, "engine": {}, "afd": {"role": "attention"} if name == "afd" else None}
            made = Engine(name, spec, tmp_path / f"{name}.log", {"PYTHONPATH": str(ROOT)})
            stack.callback(made.close)
            return made

        yield make


def test_both_sides_take_turns_and_the_first_one_does_not_count(engine: Callable[..., Engine], capsys: Any) -> None:
    sides = {name: engine(name) for name in bench_tpot.SIDES}
    assert [each.ask(60) for each in sides.values()] == [{"vllm": "1.2.3", "start_s": 7.5}] * 2
    asked: list[str] = []
    for name, each in sides.items():
        ask = each.ask
        each.ask = lambda s, ask=ask, name=name, **o: asked.append(f"{name} {o['batch']}") or ask(s, **o)  # type: ignore
    results = bench_tpot.measure(sides, parse("--batches", "2", "4", "--repeats", "3", "--tokens", "11"))
    assert asked[:8] == ["stock 2", "afd 2", "stock 4", "afd 4", "afd 2", "stock 2", "afd 4", "stock 4"]
    assert len(asked) == 16
    names = ("ms", "repeats_ms", "steps", "first_ms", "firsts_ms")
    figures = {(each["side"], each["batch"]): tuple(each[name] for name in names) for each in results}
    assert figures == {
        ("afd", 2): (3.0, [3.0] * 3, 30, 30.0, [30.0] * 3),
        ("stock", 2): (2.0, [2.0] * 3, 30, 20.0, [20.0] * 3),
        ("afd", 4): (6.0, [6.0] * 3, 30, 60.0, [60.0] * 3),
        ("stock", 4): (4.0, [4.0] * 3, 30, 40.0, [40.0] * 3),
    }


@pytest.mark.parametrize(("model", "why"), [("dead", "afd has ended"), ("silent", "afd gave no answer within 1 s")])
def test_an_engine_that_dies_or_is_silent_ends_the_measurement(
    engine: Callable[..., Engine], model: str, why: str
) -> None:
    made = engine("afd", model)
    with pytest.raises(EngineLost, match=why):
        made.ask(60)
        made.ask(1, batch=1, context=2, tokens=8, number=1)


def test_a_large_model_is_made_of_a_small_ones_files(tmp_path: Path) -> None:
    small = ROOT / "tests" / "models" / "deepseek-v2"
    made = bench_tpot.make_model(tmp_path / "large", small, "deepseek-v2-lite")
    config = json.loads((made / "config.json").read_text())
    assert config["num_hidden_layers"] == 27 and config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert not list(made.glob("*.safetensors")) and (made / "tokenizer.json").is_file()


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a folder with a config\.json"):
        bench_tpot.run(parse("--log-dir", str(tmp_path)))
    model = str(ROOT / "tests" / "models" / "deepseek-v2")
    assert bench_tpot.run(parse("--model", model, "--devices", "98", "99", "--log-dir", str(tmp_path / "logs"))) == 1
    assert "expected GPUs 98 and 99, found" in capsys.readouterr().err and not (tmp_path / "logs").exists()
    with pytest.raises(SystemExit):
        parse("--repeats", "2")
    assert "expected an integer of at least 3" in capsys.readouterr().err


def test_a_report_makes_a_table_and_a_picture(tmp_path: Path, capsys: Any) -> None:
    results = [
        bench_tpot.result(side, batch, [{"first_ms": 20 + ms, "steps_ms": steps} for steps in three])
        for batch, pair in {1: (3.0, 2.5), 16: (8.1, 8.0)}.items()
        for side, ms in zip(bench_tpot.SIDES, pair, strict=True)
        for three in [([ms, ms, ms + 0.1], [ms] * 3, [ms + 0.2] * 3)]
    ]
    report = {
        "machine": {"gpus": ["A", "B"], "vllm": "0.30.0"}, "model": "m", "weights": "dummy", "context": 1024,
        "runner": "V2", "graphs": "FULL_DECODE_ONLY", "results": results,
        "sizes": "all", "start_s": {"afd": 21.04, "stock": 19.0},
    }  # fmt: skip
    bench_tpot.show(report)
    text = capsys.readouterr().out
    assert "+20.0 %" in text and "+1.2 %" in text and "3.000 to 3.200" in text and "23.0" in text
    assert "Start: AFD 21.0 s, stock 19.0 s; sizes captured: all" in text
    pytest.importorskip("matplotlib")
    bench_tpot.draw(report, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_the_recorded_figures_are_those_of_the_page(tmp_path: Path, capsys: Any) -> None:
    report = json.loads((ROOT / "docs" / "gpu" / "tpot.json").read_text())
    page = (ROOT / "docs" / "gpu-hop.md").read_text()
    bench_tpot.show(report)
    text = capsys.readouterr().out
    for batch in bench_tpot.BATCHES:
        afd, stock = (
            next(r for r in report["results"] if (r["side"], r["batch"]) == (s, batch)) for s in bench_tpot.SIDES
        )
        gain = f"{100 * (afd['ms'] / stock['ms'] - 1):+.1f} %"
        assert f"| {batch} | {afd['ms']:.2f} | {stock['ms']:.2f} | {gain} |" in page
        assert gain in text
