"""`afdpatch up` as a process, with fakes in the place of the two vLLM servers."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from afdpatch.cli import main
from afdpatch.cli.servers import free_port

from .conftest import Fake, alive, wait_until

DRIVER = """
import sys
from pathlib import Path
from afdpatch.cli import main, topology
from afdpatch.cli.servers import Server
real = topology.afd_pair
def afd_pair(*args, **kwargs):
    pair = real(*args, **kwargs)
    for server, folder in zip(pair, sys.argv[1:3]):
        server.command = [sys.executable, sys.argv[3], folder, str(server.port)]
        server.grace = 0.3
    return pair
topology.afd_pair = afd_pair
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
        (["MODEL", "--attention", "2"], "--attention 2: not supported yet"),
        (["MODEL", "--ffn", "0"], "--ffn 0: not supported yet"),
        ([], "expected the model as the first argument"),
        (["--enforce-eager", "MODEL"], "expected the model as the first argument"),
        (["MODEL", "--port", "70000"], "--port 70000: expected 1 to 65535"),
        (["MODEL", "--port", "9000", "--ffn-port", "9000"], "--ffn-port 9000"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *words]) == 2
    assert message in capsys.readouterr().err
