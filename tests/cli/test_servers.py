"""Server and its keeper, with real processes."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from afdpatch.cli import keeper
from afdpatch.cli.servers import Server, ServerDied, ServerError, ServerSlow, describe_exit, free_port, wait_all

from .conftest import Fake, alive, wait_until


def test_it_is_ready_only_once_health_answers_200(fake: Fake) -> None:
    with fake.server() as server:
        fake.pids()
        wait_until(lambda: "load model" in server.log.path.read_text())
        assert not server.is_ready()
        assert server.log.stage == "loading weights"
        fake.say("ready")
        server.wait_ready(60)
        assert server.ready_after is not None
        assert server.main_pid == fake.pids()[0]


def test_stop_ends_every_process_even_one_that_ignores_sigterm_in_its_own_session(fake: Fake) -> None:
    with fake.server(grace=3) as server:
        pids = fake.pids()
    assert server.exit_code == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # not even a zombie


def test_kill_ends_every_process_at_once(fake: Fake) -> None:
    server = fake.server(grace=60)
    server.start()
    pids = fake.pids()
    assert server.kill() == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_a_second_stop_request_does_not_wait_for_the_grace(fake: Fake) -> None:
    server = fake.server(grace=600)
    server.start()
    pids = fake.pids()
    server.request_stop()
    wait_until(lambda: not alive(pids[0]))
    server.request_stop()
    wait_until(lambda: server.exit_code is not None)
    assert not any(map(alive, pids))


def test_a_death_during_the_start_is_told_with_exit_code_and_first_error(fake: Fake) -> None:
    fake.say("die")
    with fake.server(grace=0.2) as server, pytest.raises(ServerDied) as caught:
        server.wait_ready(60)
    assert str(caught.value) == "fake: ended with exit code 3: RuntimeError: the fake was told to die"
    assert not any(map(alive, fake.pids()))


def test_a_start_that_takes_too_long_names_the_stage_and_the_log(fake: Fake) -> None:
    with fake.server(grace=0.2) as server:
        wait_until(lambda: server.log.path.exists() and "load model" in server.log.path.read_text())
        with pytest.raises(ServerSlow, match=r"within 0 s, found it still 'loading weights'; its log is .*/fake/log"):
            server.wait_ready(0)


def test_the_wait_for_several_ends_when_one_dies(fake: Fake, other_fake: Fake) -> None:
    fake.say("ready")
    other_fake.say("die")
    with (
        fake.server("good", 0.2) as good,
        other_fake.server("bad", 0.2) as bad,
        pytest.raises(ServerDied, match="bad: "),
    ):
        wait_all([good, bad], 60)


def test_a_taken_port_is_refused_before_the_start(fake: Fake) -> None:
    server = fake.server()
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(ServerError, match=f"port {server.port} to be free"),
    ):
        server.start()
    assert not server.started


def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    server = Server("none", ["/does/not/exist"], free_port(), tmp_path / "log")
    with server, pytest.raises(ServerDied, match="exit code 127"):
        server.wait_ready(60)
    assert "can't start /does/not/exist" in server.log.path.read_text()


def test_the_keeper_passes_on_how_the_server_ended(fake: Fake) -> None:
    with fake.server(grace=0.2) as server:
        fake.pids()
        server.send(signal.SIGKILL)
        wait_until(lambda: server.exit_code is not None)
        assert server.exit_code == 128 + signal.SIGKILL
        assert describe_exit(server.exit_code) == "signal 9 (SIGKILL)"


def test_nothing_is_left_when_the_parent_is_killed(fake: Fake, tmp_path: Path) -> None:
    keep = [sys.executable, "-I", "-S", keeper.__file__, "0.2"]
    script = (
        "import os, subprocess, threading\n"
        f"subprocess.Popen([*{keep!r}, str(os.getpid()), '--', *{fake.command(free_port())!r}])\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        pids = fake.pids()
        assert all(map(alive, pids))
        parent.kill()
    wait_until(lambda: not any(map(alive, pids)))
