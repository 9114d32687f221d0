"""`afdpatch doctor` and `afdpatch drain`: real status pages, real HTTP, real processes; no vLLM."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from afdpatch.cli import client, look, main
from afdpatch.cli.servers import free_port
from afdpatch.patches.attest import Attested
from afdpatch.patches.http import AfdMiddleware
from afdpatch.registry.attest import Roll
from afdpatch.runtime.events import Event
from afdpatch.runtime.status import Peer, PeerState, State, StatusPage, StatusPages

from .conftest import wait_until

DIGEST = "d" * 64


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Signed(Attested):
    """A server whose processes have all signed alike; this test's own process would not."""

    def processes(self) -> list[dict[str, Any]]:
        return [{"process": "worker", "pid": os.getpid(), "digest": DIGEST}]

    def trouble(self) -> str | None:
        return None


@contextlib.contextmanager
def http(page: StatusPage, role: str) -> Iterator[str]:
    """A server's HTTP side; gives its URL."""
    roll = Roll.create("test", role=role, digest=DIGEST, expected=(), used={})
    app = AfdMiddleware(_app, StatusPages(page.path), Signed(roll))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def healthy(role: str) -> StatusPage:
    """The page of a worker that is fine."""
    page = StatusPage.create(role, DIGEST)
    page.set_worker()
    page.set_state(State.READY)
    page.set_peers(1)
    page.set_peer_state(PeerState.CONNECTED if role == "attention" else PeerState.NONE)
    page.beat()
    return page


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' clock stands still: a page that was beaten once stays alive, however long the test takes."""
    now = time.monotonic()
    monkeypatch.setattr("afdpatch.patches.http.monotonic", lambda: now)


@pytest.fixture
def pair() -> Iterator[tuple[StatusPage, StatusPage, list[str]]]:
    pages = healthy("attention"), healthy("ffn")
    with http(pages[0], "attention") as one, http(pages[1], "ffn") as other:
        yield (*pages, [one, other])


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """What the doctor finds; its exit code must fit."""
    code = main(["doctor", "--format", "json", *words])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == int(any(finding["severity"] != "note" for finding in found))
    for finding in found:
        assert "\n" not in "".join(finding.values()) and all(finding.values())
    return found


def test_a_pair_that_is_fine_is_said_to_be_fine(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *pair[2]]) == 0
    assert capsys.readouterr().out == "fine: 2 server(s), nothing found\n"


SICK: list[tuple[str, int, Callable[[StatusPage], None], str, str]] = [
    ("lost", 0, lambda page: page.set_peer_state(PeerState.LOST), "error", "is lost, hops wait"),
    ("given up", 0, lambda page: page.set_peer_state(PeerState.GIVEN_UP), "error", "gave up on its FFN servers"),
    ("waiting", 0, lambda page: page.set_peer_state(PeerState.WAITING), "error", "not connected"),
    ("no peers", 1, lambda page: page.set_peers(0), "warning", "no attention server is connected"),
    ("failed", 1, lambda page: page.fail("no weights"), "error", "failed (last error: no weights)"),
    ("stopped", 1, lambda page: page.set_state(State.STOPPED), "error", "is stopped"),
    ("loading", 0, lambda page: alone(page), "warning", "no FFN server has answered it"),
    ("starting", 0, lambda page: page.set_state(State.STARTING), "note", "is starting"),
    ("gone", 0, lambda page: page.set_worker(2**22 - 1), "error", "has ended"),
    ("draining", 1, lambda page: page.set_draining(True), "warning", "drains, 1 peer(s) left"),
    ("won't drain", 1, lambda page: page.request_drain(True), "warning", "was asked to drain and doesn't"),
    (
        "refused",
        1,
        lambda page: page.count(Event.REFUSED, "x doesn't fit y: dtype: a, b"),
        "error",
        "refused: doesn't fit",
    ),
    ("stranger", 1, lambda page: page.count(Event.REFUSED, "another user"), "warning", "1 connection(s) were refused"),
    ("garbage", 1, lambda page: page.count(Event.DROPPED), "warning", "1 message(s) were dropped"),
    (
        "errors",
        1,
        lambda page: page.count(Event.ERROR, "no expert"),
        "warning",
        "1 hop(s) failed (last error: no expert)",
    ),
    ("lost once", 0, lambda page: page.count(Event.PEER_LOST), "note", "were lost since its start, 0 came back"),
    ("takeover", 0, lambda page: page.count(Event.TAKEOVER), "note", "FFN servers of other blocks"),
    ("queue", 1, lambda page: page.set_queue(3), "note", "3 hop(s) wait here now"),
    (
        "silent",
        1,
        lambda page: page.name_peers([Peer(5, 77, 0)]),
        "warning",
        "attention rank 5 (process 77) says nothing",
    ),
    ("patches", 1, lambda page: page.set_manifest_digest("e" * 64), "error", "the patches differ"),
]


def alone(page: StatusPage) -> None:
    page.set_state(State.LOADING)
    page.set_peers(0)
    page.set_peer_state(PeerState.WAITING)


@pytest.mark.parametrize(("at", "hurt", "severity", "words"), [row[1:] for row in SICK], ids=[row[0] for row in SICK])
def test_each_trouble_is_one_finding_with_its_advice(
    pair: Any, capsys: pytest.CaptureFixture[str], at: int, hurt: Any, severity: str, words: str
) -> None:
    hurt(pair[at])
    found = findings(capsys, *pair[2])
    (named,) = [finding for finding in found if words in finding["found"]]
    assert named["severity"] == severity and named["advice"]
    assert named["where"].startswith(pair[2][at]) or named["where"] == "all servers"


def test_the_worst_comes_first(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pair[0].count(Event.TAKEOVER)
    pair[1].count(Event.DROPPED)
    pair[0].set_peer_state(PeerState.LOST)
    severities = [finding["severity"] for finding in findings(capsys, *pair[2])]
    assert severities == sorted(severities, key=("error", "warning", "note").index) and len(set(severities)) == 3


def test_a_heartbeat_that_is_old_is_found(pair: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("afdpatch.patches.http.monotonic", lambda: pair[1].snapshot().heartbeat_ns / 1e9 + 60)
    assert any("no sign of life for 60 s" in finding["found"] for finding in findings(capsys, *pair[2]))


def test_two_servers_of_one_role_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    with http(healthy("attention"), "attention") as one, http(healthy("attention"), "attention") as other:
        (found,) = findings(capsys, one, other)
    assert "none is an ffn server" in found["found"]


def test_nobody_and_somebody_else_at_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = findings(capsys, f"http://127.0.0.1:{free_port()}")
    assert found["severity"] == "error" and "does not answer" in found["found"]
    server = uvicorn.Server(uvicorn.Config(_app, port=(port := free_port()), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    (found,) = findings(capsys, f"http://127.0.0.1:{port}")
    server.should_exit = True
    thread.join(30)
    assert "not as an AFD server of this version" in found["found"]


WORKER = """
import os, sys
from afdpatch.runtime.status import State, PeerState, StatusPage
page = StatusPage.open(sys.argv[1])
page.set_worker(); page.set_state(State.READY); page.beat()
os.sched_setaffinity(0, {int(sys.argv[2])})
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def worker(page: StatusPage, core: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker's process, bound to a core, that beats once."""
    command = [sys.executable, "-c", WORKER, page.path, str(core)]
    environment = {**os.environ, "AFDPATCH_STATUS_PAGE": page.path}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(len(look.machine_cores()) < 2, reason="with one core every thread may run everywhere")
def test_two_workers_on_one_core_are_found_and_on_two_cores_not(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with worker(pair[0], first), worker(pair[1], first):
        shared = [finding for finding in findings(capsys, *pair[2]) if "bound to core" in finding["found"]]
        assert len(shared) == 1 and f"bound to core {first}" in shared[0]["found"]
    with worker(pair[0], first), worker(pair[1], second):
        assert not [finding for finding in findings(capsys, *pair[2]) if "bound to core" in finding["found"]]


def test_servers_of_this_machine_are_found_by_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    page = healthy("ffn")
    page.count(Event.DROPPED)
    with worker(page, min(os.sched_getaffinity(0))) as process:
        own = [finding for finding in findings(capsys) if finding["where"].startswith(f"process {os.getpid()} (ffn")]
        assert any("were dropped" in finding["found"] for finding in own)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not [seen for seen in look.local_servers() if seen.where == f"process {os.getpid()}"]


@pytest.mark.parametrize("path", ["bogus", "/etc/passwd", "/proc/1/fd/0/../1"])
def test_a_path_that_is_no_pages_is_not_opened(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afdpatch.runtime.status.StatusPages", lambda path: opened.append(path))
    opened: list[str] = []
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    environment = {**os.environ, "AFDPATCH_STATUS_PAGE": path}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(os, "listdir", lambda folder: [str(process.pid)])
        assert look.local_servers() == []
        process.kill()
    assert opened == []


def test_what_another_users_process_says_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    page = healthy("ffn")
    with worker(page, min(os.sched_getaffinity(0))):
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        assert not [seen for seen in look.local_servers() if seen.where == f"process {os.getpid()}"]


def test_a_worker_whose_server_has_gone_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; from afdpatch.runtime.status import StatusPage\n"
    code += "print(StatusPage.create('ffn').path, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        page = StatusPage.open(owner.stdout.readline().decode().strip())
        with worker(page, min(os.sched_getaffinity(0))) as process:
            owner.kill()
            owner.wait()
            orphans = [finding for finding in findings(capsys) if finding["where"] == f"process {process.pid}"]
            assert len(orphans) == 1 and "orphaned" in orphans[0]["found"]


@pytest.mark.parametrize(
    ("line", "severity", "advice"),
    [
        ("afdpatch.runtime.connectors.base.GreetingMismatch: it doesn't fit: dtype", "error", "the same model"),
        ("AddressInUse: cannot listen at x", "error", "another --afd-port"),
        ("OSError: [Errno 98] Address already in use", "error", "another --port"),
        ("afdpatch.runtime.config.ConfigError: port: found 0", "error", "correct this setting"),
        ("ConnectTimeout: no FFN server at x answered", "error", "start the FFN server too"),
        ("afdpatch: error: drifted: x", "error", "afdpatch verify"),
        ("RuntimeError: Cannot allocate memory", "error", "--kv-cache-memory-bytes lower"),
        ("RuntimeError: something else", "error", "the lines around it"),
        ("INFO 01-01 00:00:00 [x.py:1] Starting to load model m", "warning", "still starts, or was killed"),
        ("INFO:     Application startup complete.", "note", "afdpatch doctor URL"),
    ],
)
def test_a_log_tells_why_a_server_did_not_start(
    line: str, severity: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(f"some line\n{line}\n")
    (found,) = findings(capsys, "--log", str(tmp_path / "log"))
    assert found["severity"] == severity and advice in found["advice"]


def test_a_secret_that_cannot_be_used_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], pair: Any) -> None:
    path = tmp_path / "secret"
    words = [*pair[2], "--secret-file", str(path)]

    def found() -> list[str]:
        return [finding["found"] for finding in findings(capsys, *words)]

    assert "No such file" in found()[0]
    path.write_bytes(bytes(range(15)))
    path.chmod(0o640)
    assert "mode 0640" in found()[0]
    path.chmod(0o600)
    assert "15 bytes" in found()[0]
    path.write_bytes(bytes(range(16)))
    assert found() == []


@pytest.mark.parametrize("words", [["doctor", "127.0.0.1:8000"], ["drain", "ftp://x"]])
def test_an_address_that_is_none_is_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "expected an address like http://127.0.0.1" in capsys.readouterr().err


# drain


def drain(url: str, *words: str) -> int:
    return main(["drain", url, *words])


def test_drain_waits_until_no_peer_is_left_and_says_so(
    pair: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, page, (_, url) = pair
    asks: list[bool] = []
    real = client.get_json

    def get_json(*words: Any) -> Any:
        answer = real(*words)
        asks.append(answer["workers"][0]["draining"])
        return answer

    monkeypatch.setattr(client, "get_json", get_json)

    def work() -> None:
        wait_until(lambda: page.drain_requested)
        page.set_draining(True)
        asked.wait(30)
        page.set_peers(0)

    asked = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    code: list[int] = []
    draining = threading.Thread(target=lambda: code.append(drain(url)))
    draining.start()
    wait_until(lambda: sum(asks) >= 2 or bool(code))  # it has seen that the server drains, and has looked again
    assert code == []
    asked.set()
    thread.join(30)
    draining.join(30)
    assert code == [0]
    told = capsys.readouterr()
    assert "drained; it can be stopped now" in told.out and "1 peer(s) left" in told.err
    page.set_draining(False)
    assert drain(url, "--resume") == 0 and not page.drain_requested


def test_drain_ends_at_its_deadline_and_tells_what_it_found(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain(pair[2][1], "--timeout", "0.1") == 1
    assert "expected it within 0.1 s to have no peers left, found 1" in capsys.readouterr().err


def test_drain_of_an_attention_server_and_of_nobody_fail_with_the_reason(
    pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drain(pair[2][0]) == 1
    assert "only an FFN server can be drained" in capsys.readouterr().err
    assert drain(f"http://127.0.0.1:{free_port()}") == 1
    assert "refused" in capsys.readouterr().err
