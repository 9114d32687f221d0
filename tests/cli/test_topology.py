"""Cores, memory and commands of the servers; the log reader; the HTTP client's parsers."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afdpatch.cli import client, topology
from afdpatch.cli.logs import Burst, Log, parse, throughput


@given(st.sets(st.integers(0, 300), min_size=1, max_size=100), st.integers(1, 8))
def test_cores_are_split_into_contiguous_fair_blocks(cores: set[int], parts: int) -> None:
    blocks = topology.split_cores(sorted(cores), parts)
    assert len(blocks) == parts
    if len(cores) >= parts:
        assert [core for block in blocks for core in block] == sorted(cores)
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    else:
        assert [block[0] for block in blocks[: len(cores)]] == sorted(cores)
        assert all(len(block) == 1 for block in blocks)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=100))
def test_a_core_list_reads_back_as_vllm_reads_it(cores: set[int]) -> None:
    read = set()
    for part in topology.core_list(sorted(cores)).split(","):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == cores


def test_core_lists_are_short() -> None:
    assert topology.core_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_binding_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.BIND, "nobind")
    assert topology.core_binding(2) == [{}, {}]


def test_each_server_gets_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.BIND, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    monkeypatch.setattr(topology, "physical_cores", list)
    assert topology.core_binding(2) == [{topology.BIND: "2-3"}, {topology.BIND: "4-5"}]


def test_a_large_block_leaves_a_core_to_the_servers_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.BIND, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    monkeypatch.setattr(topology, "physical_cores", list)
    assert topology.core_binding(2) == [{topology.BIND: "0-3"}, {topology.BIND: "5-7"}]


def test_the_two_servers_do_not_share_a_physical_core(tmp_path: Path) -> None:
    for cpu, place in {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{place[0]}\n")
        (folder / "core_id").write_text(f"{place[1]}\n")
    assert topology.physical_cores([0, 1, 2, 3], tmp_path) == [0, 1]
    assert topology.physical_cores([2, 3], tmp_path) == [2, 3]
    assert topology.physical_cores([7, 5], tmp_path) == [5, 7]


def test_with_one_physical_core_the_logical_ones_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.BIND, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(topology, "physical_cores", lambda cores: [0])
    assert topology.core_binding(2) == [{topology.BIND: "0"}, {topology.BIND: "1"}]


def test_the_stock_server_has_vllms_own_binding_and_only_this_machine_reaches_it(tmp_path: Path) -> None:
    stock = topology.stock(["M"], tmp_path)
    assert topology.BIND not in stock.env
    assert stock.command[stock.command.index("--host") + 1] == "127.0.0.1"


def test_a_kv_cache_size_is_chosen_only_on_a_cpu_and_only_when_the_user_gave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(topology, "on_cpu", lambda: True)
    assert topology.memory_default(["M"]) == ["--kv-cache-memory-bytes", str(1 << 30)]
    assert topology.memory_default(["M", "--kv_cache_memory_bytes=5"]) == []
    assert topology.memory_default(["M", "--gpu-memory-utilization", "0.3"]) == []
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert topology.memory_default(["M"]) == []
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(topology, "on_cpu", lambda: False)
    assert topology.memory_default(["M"]) == []


def test_a_pair_shares_its_options_and_its_meeting_point(tmp_path: Path) -> None:
    attention, ffn = topology.afd_pair(
        ["M", "--enforce-eager"], tmp_path, port=9000, ffn_port=9001, afd_port=1300, ffn_options=["--seed", "1"]
    )
    for server, role, port in ((attention, "attention", "9000"), (ffn, "ffn", "9001")):
        words = server.command
        assert words[words.index("--role") + 1] == role
        assert words[words.index("--port") + 1] == port
        assert words[words.index("--afd-port") + 1] == "1300"
        assert words[words.index("M") + 1] == "--enforce-eager"
        assert server.log.path == tmp_path / f"{role}.log"
    assert "--seed" in ffn.command and "--seed" not in attention.command


def words_after(command: list[str], *names: str) -> dict[str, str]:
    return {name: command[command.index(name) + 1] for name in names if name in command}


def test_servers_of_a_shape_have_ranks_names_and_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(topology.BIND, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(topology, "physical_cores", list)
    shape = topology.Shape(attention=2, ffn=2, attention_dp=2, ffn_tp=2)
    ports = topology.choose_ports(shape, 9000, 9100, look=False)
    assert ports == [9000, 9001, 9100, 9101]
    servers = topology.afd_servers(["M"], tmp_path, shape, topology.Meeting(1300), ports)
    assert [server.name for server in servers] == ["attention0", "attention1", "ffn0", "ffn1"]
    assert [server.env[topology.BIND] for server in servers] == ["0|1", "2|3", "4|5", "6|7"]
    names = ("--rank", "--attention-ranks", "--ffn-ranks", "--ffn-tp", "--tensor-parallel-size", "--data-parallel-size")
    found = [words_after(server.command, *names) for server in servers]
    counts = {"--attention-ranks": "4", "--ffn-ranks": "4", "--ffn-tp": "2"}
    assert found == [
        {"--rank": "0", **counts, "--data-parallel-size": "2"},
        {"--rank": "2", **counts, "--data-parallel-size": "2"},
        {"--rank": "0", **counts, "--tensor-parallel-size": "2"},
        {"--rank": "2", **counts, "--tensor-parallel-size": "2"},
    ]


def test_ports_that_are_taken_are_passed_over_and_those_that_were_given_are_not() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shape = topology.Shape(attention=2)
        ports = topology.choose_ports(shape, port, None)
        assert ports[0] == port and len(set(ports)) == 3
        if port > 1024:
            assert port not in topology.choose_ports(shape, port - 1, None)[1:]


def test_the_log_reader_follows_stage_and_first_error_across_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    assert log.new_lines() == []
    with path.open("w") as file:
        file.write("(Worker pid=7) INFO 11-29 18:33:03 [model.py:1] Starting to load mod")
        file.flush()
        assert log.new_lines() == []
        file.write("el x\nERROR 11-29 18:33:04 [core.py:9] ValueError: bad\n  torn\nRuntimeError: later\n")
        file.flush()
        entries = log.new_lines()
    assert [(entry.level, entry.process) for entry in entries] == [
        ("INFO", "Worker pid=7"),
        ("ERROR", ""),
        ("", ""),
        ("", ""),
    ]
    assert log.stage == "loading weights"
    assert log.first_error == "ValueError: bad"
    assert log.tail(2) == ["  torn", "RuntimeError: later"]


def test_vllms_line_of_rates_is_found() -> None:
    line = (
        "(APIServer pid=1) INFO 11-29 18:40:00 [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s, "
        "Avg generation throughput: 2.0 tokens/s, Running: 1 reqs"
    )
    assert throughput(parse(line)) == line[line.index("Avg prompt") :]
    assert parse("(APIServer pid=1) INFO:     Application startup complete.").text == "Application startup complete."


def test_metrics_are_read_by_name_and_label() -> None:
    found = client.parse_metrics(
        "# HELP afd_hops_total Hops.\n# TYPE afd_hops_total counter\n"
        'afd_hops_total{role="ffn"} 5.0\nafd_payload_bytes_total{role="ffn",direction="a2f"} 1e3\n'
        'afd_payload_bytes_total{role="ffn",direction="f2a"} 24.0\nplain 1\n'
    )
    assert client.total(found, "afd_hops_total") == 5
    assert client.total(found, "afd_payload_bytes_total") == 1024
    assert client.total(found, "afd_payload_bytes_total", direction="f2a") == 24
    assert client.total(found, "absent") is None
    assert client.total(found, "plain", role="ffn") is None


def test_rates_of_nothing_are_not_shown() -> None:
    line = "INFO 11-29 18:40:00 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
    assert throughput(parse(line + "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs")) is None
    assert throughput(parse(line + "Avg generation throughput: 0.5 tokens/s, Running: 0 reqs"))


def test_a_burst_lets_its_first_lines_through_and_counts_the_others_once() -> None:
    burst = Burst(limit=2, quiet=1.0)
    assert [burst.admits(0.1 * number) for number in range(5)] == [True, True, False, False, False]
    assert burst.held(1.0) == 0
    assert burst.held(1.5) == 3
    assert burst.held(9.0) == 0
    assert burst.admits(9.1)


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("afdpatch: error: the target has changed", "afdpatch: error: the target has changed"),
        ("PeerLost: the FFN server ended", "PeerLost: the FFN server ended"),
        ("(W pid=3) ERROR 11-29 18:00:00 [w.py:1] HopTimeout: no answer", "HopTimeout: no answer"),
        ("afdpatch.runtime.config.ConfigError: port", "afdpatch.runtime.config.ConfigError: port"),
        ("RuntimeError: Engine core initialization failed", None),
        ("INFO 11-29 18:00:00 [w.py:1] afdpatch: error: no error at all", None),
    ],
)
def test_what_afdpatch_itself_says_is_told_from_the_rest(tmp_path: Path, line: str, own: str | None) -> None:
    log = Log(tmp_path / "log")
    log.path.write_text(f"KeyError: first\n{line}\n")
    log.new_lines()
    assert log.own_error == own
