"""A attention servers and F FFN servers, all asked at once: the answers are those of stock vLLM, asked one by one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli.load import make_prompts
from afdpatch.cli.servers import Server
from tests.e2e.cluster import ZEROABLE, Cluster
from tests.e2e.conftest import metrics
from tests.e2e.driver import rpc
from tests.e2e.servers import LAYERS, OPTIONS, ask, rows_are_alike, said, same

pytestmark = pytest.mark.full
PROMPTS = [prompt * (1 + 3 * (index % 3)) for index, prompt in enumerate(make_prompts(12, 12))]


@pytest.mark.parametrize(("attention", "ffn"), [(1, 2), (3, 2), (4, 1)])
def test_all_at_once_get_the_answers_of_stock_vllm(alone: Server, tmp_path: Path, attention: int, ffn: int) -> None:
    expected = [said(ask(alone, prompt=prompt)[1]) for prompt in PROMPTS]
    with Cluster(OPTIONS, tmp_path, attention=attention, ffn=ffn, ffn_options=ZEROABLE) as cluster:
        cluster.wait(timeout=400)
        users = [server for name, server in cluster.servers.items() if name.startswith("attention")]
        servers = [server for name, server in cluster.servers.items() if name.startswith("ffn")]
        alike = rows_are_alike(servers[0])

        def all_at_once() -> list[Any]:
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                asked = [pool.submit(ask, users[n % attention], prompt=prompt) for n, prompt in enumerate(PROMPTS)]
                return [said(answer.result()[1])[0] for answer in asked]

        for _ in range(3):
            assert same(all_at_once(), [answer[0] for answer in expected], alike)
        hops = [metrics(server.url)["afd_hops_total"] for server in servers]
        assert min(hops) > LAYERS  # every FFN server had its part
        assert sum(hops) == sum(metrics(server.url)["afd_hops_total"] for server in users)
        assert sum(metrics(server.url)["afd_takeovers_total"] for server in users) == 0
        if attention > ffn:
            merged = sum(metrics(server.url)["afd_hops_merged_total"] for server in servers)
            assert merged > 0
            print(f"{attention}x{ffn}: {merged:.0f} of {sum(hops):.0f} hops merged, rows alike: {alike}")
        for server in servers:
            rpc(server.url, "zero_ffn", True)
        assert [answer[0] for answer in all_at_once()] != [answer[0][0] for answer in expected]
