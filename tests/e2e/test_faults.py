"""The fault matrix: each row is a real fault in a real server, at a moment chosen to the hop; docs/faults.md has it.

`make test-full` runs it; with AFDPATCH_FAULTS=FILE the measured table is written there.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from afdpatch.cli.servers import Server, ServerDied, get_status, stop_all
from tests.e2e.cluster import EXTRA, LONG, SHORT, TOKENS, ZEROABLE, Cluster, Stream, streamed, title
from tests.e2e.conftest import metrics
from tests.e2e.driver import rpc
from tests.e2e.servers import GONE, LAYERS, OPTIONS, processes_below, state, until
from tests.e2e.workers import FAULT

pytestmark = pytest.mark.full
MOMENTS = {"prefill": (LONG, 3 * LAYERS + 2), "decode": (SHORT, 12 * LAYERS + 3)}
"""The prompt, and the hop at which the fault comes: in the middle of the fourth chunk, and of the twelfth step."""
TRACED = ["--compilation-config", json.dumps({"mode": "DYNAMO_TRACE_ONCE", "backend": "eager", "custom_ops": ["all"]})]
HEAD = ("| fault | process | moment | outcome | bound | measured |", "|---|---|---|---|---|---|")
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM


@dataclass(frozen=True)
class Fault:
    """A signal to a process of a server at a moment; what must be seen, and within how many seconds.

    Outcomes: `taken over` (a replica answers, the stream only pauses), `waits` (no replica: the stream ends right once
    the server is back), `others go on` (an attention server ends: its neighbour's stream is whole, its own breaks).
    """

    role: str
    process: str
    signal: signal.Signals
    moment: str
    outcome: str
    bound_s: float

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.signal.name} {self.role} {self.process}, {self.moment}: {self.outcome}"


FAULTS = [
    *(
        Fault("ffn", process, sign, moment, outcome, bound)
        for outcome, bound in (("taken over", 40.0), ("waits", 120.0))
        for process in ("worker", "engine-core", "api")
        for sign in (KILL, STOP, TERM)
        for moment in MOMENTS
        if not (sign is TERM and process != "api") and not (sign is STOP and process != "worker")
    ),
    *(
        Fault("attention", process, sign, moment, "others go on", 60.0)
        for process in ("worker", "engine-core", "api")
        for sign in (KILL, STOP)
        for moment in MOMENTS
        if not (sign is STOP and process != "worker")
    ),
]
Row = tuple[str, str, str, str, float, float]
TABLE: list[Row] = []
"""What was done, to which process, when, how it ended, within how many seconds it had to, and after how many it did."""


@pytest.fixture(scope="module")
def expected(alone: Server) -> dict[str, list[str]]:
    """What stock vLLM says, by prompt."""
    return {prompt: streamed(alone, prompt) for prompt in (SHORT, LONG)}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One attention server, two FFN servers."""
    folder = tmp_path_factory.mktemp("replicas")
    with Cluster(OPTIONS, folder, attention=1, ffn=2, extra=EXTRA, ffn_options=ZEROABLE) as cluster:
        cluster.wait()
        yield cluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two attention servers, one FFN server."""
    folder = tmp_path_factory.mktemp("shared")
    with Cluster(OPTIONS, folder, attention=2, ffn=1, extra=EXTRA, ffn_options=ZEROABLE) as cluster:
        cluster.wait()
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Writes what was measured, if somebody asks for it, behind what is there."""
    yield
    name = os.environ.get("AFDPATCH_FAULTS")
    if name and TABLE:
        path = Path(name)
        lines = [path.read_text().rstrip("\n")] if path.exists() else [*HEAD]
        for what, process, moment, outcome, bound, seconds in TABLE:
            lines.append(f"| {what} | {process} | {moment} | {outcome} | {bound:.0f} s | {seconds:.1f} s |")
        path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_as_the_table_says(
    request: pytest.FixtureRequest, expected: dict[str, list[str]], fault: Fault
) -> None:
    taken_over = fault.outcome == "taken over"
    cluster: Cluster = request.getfixturevalue("replicas" if taken_over else "shared")
    attention = cluster.servers["attention0"]
    prompt, hop = MOMENTS[fault.moment]
    victim = cluster.servers["ffn0" if fault.role == "ffn" else "attention0"]
    pid = cluster.pid(victim.name, fault.process)
    # A worker whose API server was killed may still say goodbye between two hops; then none is sent again.
    felt = "afd_hops_repeated_total" if fault.process == "worker" else "afd_peers_lost_total"
    before = metrics(attention.url)[felt]
    # Two replicas get a rank's hops in turn, so ffn0 sees every second one.
    rpc(cluster.servers["ffn0"].url, "signal_at", hop // 2 if taken_over else hop, pid, int(fault.signal))
    stream = Stream(attention, prompt)
    begin = time.monotonic()
    try:
        until(lambda: state(pid) in ("T", *GONE), 60, f"the fault strikes process {pid}")
        if fault.outcome == "others go on":
            assert Stream(cluster.servers["attention1"], prompt).result(fault.bound_s) == expected[prompt]
            until(
                lambda: metrics(cluster.servers["ffn0"].url)["afd_peers"] == 1,
                fault.bound_s,
                "one peer at the FFN server",
            )
        elif fault.outcome == "waits":
            until(lambda: get_status(attention.host, attention.port, "/health") == 503, 30, "503 while hops wait")
            mend(cluster, victim, fault, pid)
            assert stream.result(fault.bound_s) == expected[prompt]
        else:
            assert stream.result(fault.bound_s) == expected[prompt]
        took = time.monotonic() - begin
        who = f"{fault.role} {fault.process}"
        TABLE.append((fault.signal.name, who, fault.moment, fault.outcome, fault.bound_s, took))
        if fault.role == "ffn":
            assert metrics(attention.url)[felt] > before
    finally:
        mend(cluster, victim, fault, pid)
        cluster.wait(timeout=180)
    assert streamed(cluster.servers["attention0"], prompt) == expected[prompt]


def mend(cluster: Cluster, server: Server, fault: Fault, pid: int) -> None:
    """Let a stopped process go on, or start the server again once it has ended; nothing when that was done already."""
    if fault.signal is STOP:
        os.kill(pid, signal.SIGCONT)
    elif cluster.servers[server.name] is server:
        until(lambda: server.exit_code is not None, 60, f"{server.name} ends after {fault.name}")
        cluster.start(server.name)


@pytest.mark.parametrize(
    ("moment", "fault"),
    [
        ("greeting", f"greet {KILL:d}"),
        ("greeting", f"greet {STOP:d}"),
        ("load", f"load {KILL:d}"),
        ("warm-up", f"hop {LAYERS // 2} {KILL:d}"),
    ],
    ids=["SIGKILL greeting", "SIGSTOP greeting", "SIGKILL load", "SIGKILL warm-up"],
)
def test_an_ffn_server_that_fails_while_the_pair_starts_is_waited_for(
    tmp_path: Path, expected: dict[str, list[str]], moment: str, fault: str
) -> None:
    # Without a compiler vLLM warms nothing up on a CPU; with the one that compiles nothing, tokens are those of eager.
    words = [word for word in OPTIONS if word != "--enforce-eager"]
    own = TRACED if moment == "warm-up" else []
    ffn = [*ZEROABLE, "--enforce-eager"]
    cluster = Cluster(words if own else OPTIONS, tmp_path, extra=EXTRA, attention_options=own, ffn_options=ffn)
    sign = signal.Signals(int(fault.split()[-1]))
    try:
        cluster.environment("ffn0", **{FAULT: fault})
        first = cluster.start("ffn0")
        attention = cluster.start("attention0")
        if sign is STOP:
            until(lambda: "its FFN servers" in attention.log.path.read_text(), 120, "the attention server greets")
            worker = int(until(lambda: stopped_worker(first), 60, "the FFN server's worker is stopped"))
            begin = time.monotonic()
            until(lambda: time.monotonic() > begin + 5, 20, "longer than the first greeting may take")
            os.kill(worker, signal.SIGCONT)
        else:
            until(lambda: first.exit_code is not None, 180, "the FFN server dies")
            begin = time.monotonic()
            cluster.environment("ffn0", **{FAULT: None})
            cluster.start("ffn0")
        cluster.wait(timeout=200)
        TABLE.append((sign.name, "ffn worker", moment, "waits, both ready", 200, time.monotonic() - begin))
        assert attention.exit_code is None
        assert streamed(attention, SHORT) == expected[SHORT]
    finally:
        stop_all(list(cluster.servers.values()))


def test_an_attention_server_that_dies_while_the_pair_starts_is_forgotten(
    tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    cluster = Cluster(OPTIONS, tmp_path, extra=EXTRA, ffn_options=ZEROABLE)
    try:
        ffn, first = cluster.start("ffn0"), cluster.start("attention0")
        until(lambda: "attention rank 0 (" in ffn.log.path.read_text(), 180, "the attention server has greeted")
        cluster.signal("attention0", "engine-core")
        begin = time.monotonic()
        until(lambda: first.exit_code is not None, 60, "the attention server ends")
        attention = cluster.start("attention0")
        cluster.wait(timeout=200)
        TABLE.append((KILL.name, "attention engine-core", "load", "both ready again", 200, time.monotonic() - begin))
        assert ffn.exit_code is None and metrics(ffn.url)["afd_peers"] == 1
        assert streamed(attention, SHORT) == expected[SHORT]
    finally:
        stop_all(list(cluster.servers.values()))


def stopped_worker(server: Server) -> int | None:
    """The process id of a server's worker, below its EngineCore or that itself, once it is stopped."""
    found = processes_below(server.pid)
    return next((pid for pid in found if state(pid) == "T" and ("Worker" in title(pid) or "Core" in title(pid))), None)


def test_servers_that_dont_fit_end_both_with_field_and_values(tmp_path: Path) -> None:
    cluster = Cluster(OPTIONS, tmp_path, extra=EXTRA, attention_options=["--dtype", "float32"])
    try:
        ffn, attention = cluster.start("ffn0"), cluster.start("attention0")
        until(lambda: "event=refused" in ffn.log.path.read_text(), 180, "they greet")
        begin = time.monotonic()
        until(lambda: None not in (ffn.exit_code, attention.exit_code), 10, "both end")
        TABLE.append(("other dtype", "both servers", "greeting", "both end", 10, time.monotonic() - begin))
        assert "dtype: ours bfloat16, theirs float32" in ffn.log.path.read_text()
        assert "dtype: ours float32, theirs bfloat16" in attention.log.path.read_text()
        for server in (ffn, attention):
            with pytest.raises(ServerDied, match="dtype: ours"):
                server.check()
    finally:
        stop_all(list(cluster.servers.values()))


@pytest.mark.parametrize(("sign", "before"), [(KILL, True), (KILL, False), (STOP, False)])
def test_sigterm_of_an_attention_server_whose_ffn_server_is_gone_ends_in_time(
    shared: Cluster, sign: signal.Signals, before: bool
) -> None:
    attention, ffn = shared.servers["attention0"], shared.servers["ffn0"]
    pid = shared.pid("ffn0", "worker")
    lost = metrics(attention.url)["afd_peers_lost_total"]
    try:
        if before:
            os.kill(pid, sign)
            stream = Stream(attention, LONG)
            until(lambda: metrics(attention.url)["afd_peers_lost_total"] > lost, 30, "the loss is seen")
        else:
            hops = metrics(attention.url)["afd_hops_total"]
            stream = Stream(attention, LONG)
            until(lambda: metrics(attention.url)["afd_hops_total"] > hops, 30, "the request runs")
        attention.send(signal.SIGTERM)
        begin = time.monotonic()
        if not before:
            os.kill(pid, sign)
        until(lambda: attention.exit_code is not None, 20, "the attention server ends within 20 s of SIGTERM")
        took = time.monotonic() - begin
        assert attention.exit_code == 0, json.dumps(attention.log.path.read_text()[-3000:])
        stream.join(20)
        assert not stream.is_alive() and len(stream.tokens) < TOKENS
        moment = f"shutdown, {'before' if before else 'after'} SIGTERM"
        TABLE.append((sign.name, "ffn worker", moment, "attention ends, exit code 0", 20, took))
    finally:
        if sign is STOP:
            os.kill(pid, signal.SIGCONT)
        else:
            until(lambda: ffn.exit_code is not None, 60, "the FFN server ends")
            shared.start("ffn0")
        stop_all([attention])
        shared.start("attention0")
        shared.wait(timeout=180)
