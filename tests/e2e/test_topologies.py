"""More than one of a role: attention servers, data-parallel attention ranks, tensor parallelism on both sides."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli.servers import Server, free_port, get_status, wait_all
from tests.e2e.conftest import metrics
from tests.e2e.servers import LAYERS, OPTIONS, PROMPT, QUICK, ask, rows_are_alike, said, same, server, until
from tests.e2e.test_servers_loss import kill_in_the_second_chunk, long_prompt, processes, start_again

PROMPTS = [PROMPT, "If the *key* is not found,", "class Thread:\n    def", long_prompt("Topology")]


def answers(servers: Sequence[Server], prompts: Sequence[str]) -> list[Any]:
    """What the servers say to the prompts, all asked at once, the n-th prompt of the n-th server in turn."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, servers[n % len(servers)], prompt=prompt) for n, prompt in enumerate(prompts)]
        return [said(answer.result()[1]) for answer in asked]


def one_by_one(server: Server, prompts: Sequence[str]) -> list[Any]:
    """What a server says to the prompts, each alone in its batch."""
    return [said(ask(server, prompt=prompt)[1]) for prompt in prompts]


def test_two_attention_servers_share_an_ffn_server_and_one_outlives_the_other(
    pair: tuple[Server, Server], alone: Server, tmp_path: Path
) -> None:
    attention, ffn = pair
    afd_port = int(attention.command[attention.command.index("--afd-port") + 1])
    afd = {"role": "attention", "port": afd_port, "num_attention_ranks": 2, "rank": 1}
    expected = one_by_one(alone, PROMPTS[:2])
    with server("second", OPTIONS, tmp_path, afd, "0") as second:
        second.wait_ready(300)
        assert metrics(ffn.url)["afd_peers"] == 2
        alike = rows_are_alike(ffn)
        for _ in range(5):
            for found, each in zip(answers([attention, second], PROMPTS[:2]), expected, strict=True):
                assert same(found, each, alike)
        until(lambda: get_status("127.0.0.1", second.port, "/health") == 200, 30, "/health of the second is 200")
        os.kill(int(metrics(second.url)["afd_worker_pid"]), signal.SIGKILL)
        assert one_by_one(attention, PROMPTS[:2]) == expected
        until(lambda: metrics(ffn.url)["afd_peers"] == 1, 30, "the FFN server has one peer")
        until(lambda: second.exit_code is not None, 60, "the second attention server ends")
    until(lambda: get_status("127.0.0.1", ffn.port, "/health") == 200, 30, "/health of the FFN server is 200")


def by_rank(server: Server, name: str) -> dict[str, float]:
    """One metric of each of a server's workers."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        found = re.findall(rf'^{name}\{{.*rank="(\d+)".*\}} (\S+)$', response.read().decode(), re.MULTILINE)
    return {rank: float(value) for rank, value in found}


@pytest.mark.full
def test_data_parallel_attention_ranks_go_their_own_ways(alone: Server, tmp_path: Path) -> None:
    afd = {"port": free_port(), "num_attention_ranks": 2}
    options = [*OPTIONS, "--data-parallel-size", "2", "--api-server-count", "1"]
    ffn = server("ffn", OPTIONS, tmp_path, afd | {"role": "ffn"}, "1")
    attention = server("attention", options, tmp_path, afd | {"role": "attention"}, "0|0")
    with ffn, attention:
        wait_all([ffn, attention], 400)
        kinds = [kind for item in _attested(attention) for kind in item["processes"]]
        assert sorted(kinds) == ["api", "engine-core", "engine-core", "worker", "worker"]
        assert one_by_one(attention, PROMPTS) == one_by_one(alone, PROMPTS)  # the other rank has no batch
        for _ in range(5):
            answers([attention], PROMPTS)
        hops = by_rank(attention, "afd_hops_total")
        assert hops.keys() == {"0", "1"}
        assert min(hops.values()) > 0
        assert metrics(ffn.url)["afd_hops_total"] == sum(hops.values())


def _attested(server: Server) -> Any:

    with urllib.request.urlopen(f"{server.url}/afd/processes", timeout=10) as response:
        return json.loads(response.read())


@pytest.mark.full
def test_a_tensor_parallel_attention_server_uses_every_ffn_server(tmp_path: Path) -> None:
    afd: dict[str, Any] = {"port": free_port(), "num_attention_ranks": 2, "num_ffn_ranks": 2}
    ffns = [server(f"ffn{rank}", OPTIONS, tmp_path, afd | {"role": "ffn", "rank": rank}, "1") for rank in range(2)]
    options = [*OPTIONS, "--tensor-parallel-size", "2"]
    attention = server("attention", options, tmp_path, afd | {"role": "attention"}, "0|0")
    with ffns[0], ffns[1], attention:
        wait_all([*ffns, attention], 400)
        status, answer = ask(attention)
        assert status == 200 and answer["usage"]["completion_tokens"] == 24
        hops = [metrics(ffn.url)["afd_hops_total"] for ffn in ffns]
        assert min(hops) >= LAYERS * 24 / 2 and abs(hops[0] - hops[1]) <= 1


@pytest.mark.full
def test_tensor_parallelism_on_both_sides_says_what_stock_vllm_says_with_it(tmp_path: Path) -> None:
    options = [*OPTIONS, "--tensor-parallel-size", "2"]
    afd: dict[str, Any] = {"port": free_port(), "num_attention_ranks": 2, "num_ffn_ranks": 2}
    extra = {"connector_extra_config": QUICK["connector_extra_config"] | {"ffn_tp": 2}}
    zeroable = ["--worker-cls", "tests.e2e.workers.SwitchableFFNWorker"]
    with server("stock", options, tmp_path, None, "0|1") as stock:
        stock.wait_ready(300)
        expected = one_by_one(stock, PROMPTS)
    ffn = server("ffn", [*options, *zeroable], tmp_path, afd | extra | {"role": "ffn"}, "0|1")
    attention = server("attention", options, tmp_path, afd | extra | {"role": "attention"}, "0|1")
    with ffn, attention:
        wait_all([ffn, attention], 400)
        assert one_by_one(attention, PROMPTS) == expected
        # The first ranks hop for the others.
        assert by_rank(attention, "afd_hops_total")["1"] == by_rank(ffn, "afd_hops_total")["1"] == 0
        hops = by_rank(attention, "afd_hops_total")["0"]
        assert hops == by_rank(ffn, "afd_hops_total")["0"] >= LAYERS * len(PROMPTS) * 24
        before = processes(attention)
        # The FFN server dies within a layer: the step ends on both of the attention server's ranks alike.
        assert kill_in_the_second_chunk(attention, ffn, long_prompt("Tensor")) == 500
        assert processes(attention) == before
        start_again(attention, ffn)
        assert one_by_one(attention, PROMPTS) == expected
        # A rank that doesn't lead dies: the FFN server ends, and doesn't wait for it.
        os.kill(int(by_rank(ffn, "afd_worker_pid")["1"]), signal.SIGKILL)
        until(lambda: ffn.exit_code is not None, 60, "the FFN server ends")
