import argparse
import json
import os

import pytest
import torch

from afdpatch.cli import bench_hop


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench_hop.add_parser(parser.add_subparsers())
    args = parser.parse_args(["hop", *arguments])
    return args.run(args)


def test_it_measures_all_transports_side_by_side_and_writes_json(tmp_path, capsys):
    file = tmp_path / "hop.json"
    arguments = [
        "--round-trips",
        "40",
        "--block",
        "10",
        "--rows",
        "1",
        "3",
        "--hidden",
        "128",
        "--pauses-us",
        "0",
        "100",
    ]
    assert run(*arguments, "--format", "json", "--output", str(file)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    lines = [(r["pause_us"], r["payload_bytes"], r["transport"]) for r in report["results"]]
    transports = ["shm", "shm, no spin", "tcp", "bare TCP"]
    assert lines == [(pause, rows * 256, name) for pause in (0, 100) for rows in (1, 3) for name in transports]
    for result in report["results"]:
        assert result["round_trips"] == 40 and 0 < result["min_us"] <= result["p50_us"] <= result["p99_us"]


def test_the_table_names_every_payload_and_transport_and_cores_are_given_back(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    before = os.sched_getaffinity(0), torch.get_num_threads()
    assert run("--round-trips", "10", "--block", "5", "--rows", "2", "--pauses-us", "0") == 0
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    text = capsys.readouterr().out
    assert "8 KB" in text and "tcp" in text and "bare" in text and "no spin" in text


@pytest.mark.parametrize(
    "arguments", [["--round-trips", "9"], ["--rows", "0"], ["--pauses-us", "-1"], ["--block", "x"]]
)
def test_wrong_numbers_are_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2 and "expected an integer of at least" in capsys.readouterr().err
