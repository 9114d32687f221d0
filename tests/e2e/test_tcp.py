"""The connector `tcp` between two network namespaces with addresses of their own: equal tokens, a slow link, a cut one.

Needs root (or CAP_NET_ADMIN), `ip` and `tc`.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from afdpatch.cli.servers import Server, get_status
from tests.e2e.cluster import EXTRA, LONG, SHORT, ZEROABLE, Cluster, Stream, streamed
from tests.e2e.conftest import metrics
from tests.e2e.driver import rpc
from tests.e2e.servers import LAYERS, OPTIONS, until

pytestmark = pytest.mark.full
NAMESPACE, HERE, THERE = "afdpatch-test", "10.77.31.1", "10.77.31.2"
NEAR, FAR = "afd-near", "afd-far"
SLOW = ("tbf", "rate", "2mbit", "burst", "16kb", "latency", "500ms")


def sh(*command: str) -> None:
    """Run a command of the system's; its text when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.fixture(scope="module")
def link() -> Iterator[None]:
    """A second network namespace, joined to this one by a link with an address at each end."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True)
    sh("ip", "netns", "add", NAMESPACE)
    try:
        sh("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        sh("ip", "addr", "add", f"{HERE}/24", "dev", NEAR)
        sh("ip", "link", "set", NEAR, "up")
        for words in (
            ("addr", "add", f"{THERE}/24", "dev", FAR),
            ("link", "set", FAR, "up"),
            ("link", "set", "lo", "up"),
        ):
            sh("ip", "-n", NAMESPACE, *words)
        yield
    finally:
        sh("ip", "netns", "del", NAMESPACE)


@pytest.fixture(scope="module")
def pair(link: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The FFN server in the other namespace, the attention server here."""
    folder = tmp_path_factory.mktemp("tcp")
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    extra = EXTRA | {"secret_file": str(secret), "hop_timeout_s": 5}
    cluster = Cluster(
        OPTIONS, folder, extra=extra, ffn_options=[*ZEROABLE, "--host", THERE], connector="tcp", host=THERE,
        within={"ffn0": (["ip", "netns", "exec", NAMESPACE], THERE)},
    )  # fmt: skip
    with cluster:
        cluster.wait()
        yield cluster


@pytest.fixture(scope="module")
def expected(alone: Server) -> dict[str, list[str]]:
    """What stock vLLM says, by prompt."""
    return {prompt: streamed(alone, prompt) for prompt in (SHORT, LONG)}


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_tokens_over_tcp_are_those_of_stock_vllm(pair: Cluster, expected: dict[str, list[str]], prompt: str) -> None:
    attention, ffn = pair.servers["attention0"], pair.servers["ffn0"]
    before = metrics(ffn.url)["afd_hops_total"]
    assert streamed(attention, prompt) == expected[prompt]
    assert metrics(ffn.url)["afd_hops_total"] >= before + LAYERS * len(expected[prompt])
    rpc(ffn.url, "zero_ffn", True)
    try:
        assert streamed(attention, prompt) != expected[prompt]
    finally:
        rpc(ffn.url, "zero_ffn", False)


def test_a_slow_link_only_slows(pair: Cluster, expected: dict[str, list[str]]) -> None:
    sh("tc", "qdisc", "add", "dev", NEAR, "root", *SLOW)
    try:
        assert streamed(pair.servers["attention0"], SHORT) == expected[SHORT]
    finally:
        sh("tc", "qdisc", "del", "dev", NEAR, "root")


def test_a_link_that_is_cut_and_comes_back_only_pauses(pair: Cluster, expected: dict[str, list[str]]) -> None:
    attention, ffn = pair.servers["attention0"], pair.servers["ffn0"]
    before = metrics(attention.url)
    hops = metrics(ffn.url)["afd_hops_total"]
    sh("tc", "qdisc", "add", "dev", NEAR, "root", *SLOW)
    stream = Stream(attention, LONG)
    until(lambda: metrics(ffn.url)["afd_hops_total"] > hops + LAYERS, 60, "hops are on their way")
    sh("ip", "link", "set", NEAR, "down")
    try:
        until(
            lambda: get_status("127.0.0.1", attention.port, "/health") == 503, 40, "/health 503 while the link is cut"
        )
    finally:
        sh("ip", "link", "set", NEAR, "up")
        subprocess.run(["tc", "qdisc", "del", "dev", NEAR, "root"], capture_output=True)
    assert stream.result(120) == expected[LONG]
    assert metrics(attention.url)["afd_hops_repeated_total"] > before["afd_hops_repeated_total"]
    until(lambda: get_status("127.0.0.1", attention.port, "/health") == 200, 30, "/health 200 again")


def test_a_server_without_the_secret_is_not_served(pair: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "secret"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    before = metrics(pair.servers["ffn0"].url)["afd_peers_refused_total"]
    stranger = pair.another("attention0", "stranger", {"secret_file": str(wrong), "connect_timeout_s": 60})
    with stranger:
        until(lambda: stranger.exit_code is not None, 120, "the stranger ends")
        assert stranger.exit_code != 0
        assert "secret" in stranger.log.path.read_text()
    assert metrics(pair.servers["ffn0"].url)["afd_peers_refused_total"] > before
