"""Fakes and waits for the tests of the command line."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afdpatch.cli.servers import Server, free_port

FAKE = Path(__file__).with_name("fake_server.py")


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing within {seconds} s"
        threading.Event().wait(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class Fake:
    """One fake server's folder, and what the test says to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, word: str) -> None:
        (self.folder / word).touch()

    def command(self, port: int) -> list[str]:
        return [sys.executable, str(FAKE), str(self.folder), str(port)]

    def server(self, name: str = "fake", grace: float = 2.0) -> Server:
        port = free_port()
        return Server(name, self.command(port), port, self.folder / "log", grace=grace)

    def pids(self) -> list[int]:
        """The server's process and its stubborn child; waits until they are there."""
        wait_until((self.folder / "pids").exists)
        return [int(word) for word in (self.folder / "pids").read_text().split()]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from _with_cleanup(Fake(tmp_path / "fake"))


@pytest.fixture
def other_fake(tmp_path: Path) -> Iterator[Fake]:
    yield from _with_cleanup(Fake(tmp_path / "other"))


def _with_cleanup(fake: Fake) -> Iterator[Fake]:
    yield fake
    if (fake.folder / "pids").exists():
        for pid in fake.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
