"""`afdpatch up` as a process, with fakes in the place of the two vLLM servers."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli import checks, main
from afdpatch.cli.servers import free_port

from .conftest import Fake, alive, wait_until

DRIVER = """
import sys
from pathlib import Path
from afdpatch.cli import main, report
real = report.bring_up
def bring_up(servers, *args, **kwargs):
    for server, folder in zip(servers, sys.argv[1:3]):
        server.command = [sys.executable, sys.argv[3], folder, str(server.port)]
        server.grace = 0.3
    return real(servers, *args, **kwargs)
report.bring_up = bring_up
sys.exit(main(["up", "MODEL", *sys.argv[4:]]))
"""


class Up:
    """A running `up`: its process, and the events that it has printed."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process, self.out = process, out

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.out.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, name: str) -> dict[str, Any]:
        wait_until(lambda: bool(self.events(name)))
        return self.events(name)[0]


@contextmanager
def up(tmp_path: Path, fakes: tuple[Fake, Fake], *options: str) -> Iterator[Up]:
    out = tmp_path / "out"
    script = Path(__file__).with_name("fake_server.py")
    words = [*(str(fake.folder) for fake in fakes), str(script), "--log-dir", str(tmp_path / "logs"), *options]
    with out.open("w") as stdout:
        process = subprocess.Popen([sys.executable, "-c", DRIVER, *words], stdout=stdout)
    try:
        yield Up(process, out)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def fakes(fake: Fake, other_fake: Fake) -> tuple[Fake, Fake]:
    return fake, other_fake


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_nothing(tmp_path: Path, fakes: tuple[Fake, Fake], number: int) -> None:
    port = free_port()
    with up(tmp_path, fakes, "--port", str(port), "--format", "json") as running:
        pids = [pid for fake in fakes for pid in fake.pids()]
        running.wait_for("stage")
        for fake in fakes:
            fake.say("ready")
        serving = running.wait_for("serving")
        assert serving["endpoint"] == f"http://127.0.0.1:{port}/v1"
        assert '"model": "fake-model"' in serving["curl"]
        running.process.send_signal(number)
        assert running.process.wait(60) == 0
        assert {event["server"] for event in running.events("stopped")} == {"attention", "ffn"}
        assert not any(map(alive, pids))


def test_when_one_dies_the_other_is_taken_down_and_the_exit_code_is_1(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    for fake in fakes:
        fake.say("ready")
    with up(tmp_path, fakes, "--port", str(free_port()), "--format", "json") as running:
        running.wait_for("serving")
        fakes[1].say("die")
        assert running.process.wait(60) == 1
        failed = running.wait_for("failed")
        assert (failed["server"], failed["exit_code"]) == ("ffn", 3)
        assert failed["first_error"] == "RuntimeError: the fake was told to die"
        assert any("was told to die" in line for line in failed["tail"])
        assert not any(alive(pid) for fake in fakes for pid in fake.pids())


def test_a_death_during_the_start_is_shown_to_a_person(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    fakes[0].say("die")
    with up(tmp_path, fakes, "--port", str(free_port())) as running:
        assert running.process.wait(60) == 1
    out = (tmp_path / "out").read_text()
    assert "error: attention: ended with exit code 3: RuntimeError: the fake was told to die" in out
    assert "\x1b" not in out


def test_nothing_is_left_when_up_is_killed(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    for fake in fakes:
        fake.say("ready")
    with up(tmp_path, fakes, "--port", str(free_port()), "--format", "json") as running:
        running.wait_for("serving")
        running.process.kill()
        running.process.wait()
    wait_until(lambda: not any(alive(pid) for fake in fakes for pid in fake.pids()))


def test_a_signal_during_the_start_ends_it_with_0(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    with up(tmp_path, fakes, "--port", str(free_port()), "--format", "json") as running:
        for fake in fakes:
            fake.pids()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0


def test_warnings_of_the_logs_are_passed_on_and_each_server_has_its_binding(
    tmp_path: Path, fakes: tuple[Fake, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0,1")
    with up(tmp_path, fakes, "--port", str(free_port()), "--format", "json") as running:
        started = running.wait_for("started")
        assert "VLLM_CPU_OMP_THREADS_BIND" not in started["env"]
        for fake in fakes:
            fake.pids()
        wait_until(lambda: "cores are 0,1" in (tmp_path / "logs" / "ffn.log").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--attention", "-1"], "--attention -1: expected at least 1"),
        (["MODEL", "--ffn-tp", "0"], "--ffn-tp 0: expected at least 1"),
        (["MODEL", "--attention", "2", "--port", "9000", "--ffn-port", "9001"], "--ffn-port 9001: an attention server"),
        (["MODEL", "--tensor-parallel-size", "2"], "give --attention-tp and --ffn-tp"),
        (["MODEL", "--data-parallel-size=2"], "give --attention-dp"),
        (["MODEL", "--hosts", "a,b"], "--hosts: up starts servers on this machine only; add --dry-run"),
        (["MODEL", "--dry-run", "--ffn", "2", "--hosts", "a,b"], "--hosts: found 2 for 3 servers"),
        (["MODEL", "--dry-run", "--hosts", "10.0.0.1,10.0.0.2"], "secret_file: found none with connector 'tcp'"),
        ([], "expected the model as the first argument"),
        (["--enforce-eager", "MODEL"], "expected the model as the first argument"),
        (["MODEL", "--port", "70000"], "--port 70000: expected 1 to 65535"),
        (["MODEL", "--port", "9000", "--ffn-port", "9000"], "--ffn-port 9000"),
        (["MODEL", "--grpc"], "--grpc: not supported with a role"),
        (["MODEL", "--grp"], "--grpc: not supported with a role"),
        (["MODEL", "--attention-args=--grpc"], "--grpc: not supported with a role"),
        (["MODEL", "--additional-config", '{"afd": {"prot": 1}}'], "did you mean 'port'?"),
        (["MODEL", "--ffn-args=--additional-config={"], "expected a JSON object"),
        (["MODEL", "--afd-port", "5", "--additional-config", '{"afd": {"port": 6}}'], "key 'port' is 6 there and 5"),
        (["MODEL", "--ffn-args='x"], "expected words as a shell has them"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_commands_that_serve_takes(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--hosts", "10.0.0.1,10.0.0.2,10.0.0.2", "--secret-file", "/s"]
    assert main(["up", "MODEL", "--ffn", "2", "--dry-run", *hosts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["# on 10.0.0.1: attention", "# on 10.0.0.2: ffn0", "# on 10.0.0.2: ffn1"]
    for rank, line in enumerate(lines[1::2], -1):
        words = [word for word in shlex.split(line) if not word.startswith("VLLM_")]
        assert words[:2] == ["afdpatch", "serve"]
        assert words[words.index("--ffn-addresses") + 1] == "10.0.0.2:1239,10.0.0.2:1240"
        assert words[words.index("--rank") + 1] == str(max(rank, 0))
    assert main(["up", "MODEL", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("option", ["--port", "--ffn-port"])
def test_a_taken_port_is_named_before_anything_starts(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["up", "MODEL", "--log-dir", str(tmp_path / "logs"), "--port", str(free_port()), option, str(port)]
        assert main(words) == 2
    assert f"{option} {port}: expected the port to be free" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "a-name-that-is-longer-than-what-fits-into-the-address-of-a-socket.example"]
)
def test_a_taken_meeting_point_is_named_before_anything_starts(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from afdpatch.runtime.connectors._memory import address_of, readable

    port = free_port()
    address = address_of(host, port, 0)
    assert checks.meeting_point(host, port) == readable(address)
    words = ["up", "MODEL", "--log-dir", str(tmp_path / "logs"), "--port", str(free_port()), "--afd-port", str(port)]
    words += ["--additional-config", json.dumps({"afd": {"host": host}})]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(address)
        taken.listen()
        assert main(words) == 2
    assert f"--afd-port {port}: expected the pair's meeting point {readable(address)}" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_our_own_error_comes_first_and_routes_are_left_out(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    words = ["ValueError: an earlier one"]
    words += ["(W pid=1) ERROR 01-01 00:00:00 [x.py:1] afdpatch.runtime.connectors.base.GreetingMismatch: other model"]
    words += ["(A pid=1) INFO 01-01 00:00:00 [l.py:1] Route: /health, Methods: GET"] * 30
    words += ['INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable'] * 30
    (fakes[0].folder / "last words").write_text("\n".join(words))
    fakes[0].say("die")
    with up(tmp_path, fakes, "--port", str(free_port())) as running:
        assert running.process.wait(60) == 1
    out = (tmp_path / "out").read_text()
    assert "attention: ended with exit code 3: afdpatch.runtime.connectors.base.GreetingMismatch: other model\n" in out
    assert out.index("GreetingMismatch") < out.index("the first exception: ValueError: an earlier one")
    assert "told to die" in out[out.index("the last lines of") :]
    assert "Route:" not in out and "GET /health" not in out


def test_a_flood_of_warnings_is_cut_and_counted(tmp_path: Path, fakes: tuple[Fake, Fake]) -> None:
    for fake in fakes:
        fake.say("ready")
    with up(tmp_path, fakes, "--port", str(free_port()), "--format", "json") as running:
        running.wait_for("serving")
        flood = ["(W pid=1) WARNING 01-01 00:00:00 [x.py:1] again"] * 50
        (fakes[1].folder / "last words").write_text("\n".join(flood))
        fakes[1].say("die")
        assert running.process.wait(60) == 1
        assert sum(event["text"] == "again" for event in running.events("log")) <= 20
        (more,) = running.events("more")
        assert more["lines"] >= 30 and more["log"].endswith("ffn.log")


def test_where_the_logs_go_is_said_once_and_a_killed_server_by_its_signal(
    tmp_path: Path, fakes: tuple[Fake, Fake]
) -> None:
    for fake in fakes:
        fake.say("ready")
    with up(tmp_path, fakes, "--port", str(free_port())) as running:
        wait_until(lambda: "Ctrl-C ends them" in running.out.read_text())
        os.kill(fakes[1].pids()[0], signal.SIGKILL)
        assert running.process.wait(60) == 1
    out = running.out.read_text()
    assert out.count(str(tmp_path / "logs" / "attention.log")) == 1
    assert "ffn: ended with signal 9 (SIGKILL)" in out
