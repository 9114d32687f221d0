"""A server as a child process: started, watched until it answers, stopped so that nothing of it is left.

`up`, `demo`, `bench serve` and the end-to-end tests all use `Server`. Each server runs below a keeper (keeper.py),
which ends it when its parent ends, by whatever means.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from afdpatch.cli import keeper
from afdpatch.cli.logs import Log

GRACE_SECONDS = 20.0
POLL_SECONDS = 0.1
SERVER_PORTS = (20000, 32768)


class ServerError(Exception):
    """A server can't be used; the text names it and says what was found."""

    def __init__(self, server: Server, message: str) -> None:
        super().__init__(f"{server.name}: {message}")
        self.server = server


class ServerDied(ServerError):
    """The process ended when it should not have."""


class ServerSlow(ServerError):
    """It did not answer in time."""


class Server:
    """One HTTP server process with a log file of its own.

    `command` is run with `env` laid over this process's environment, stdout and stderr to `log_path`. It is ready
    once GET `health` on `port` answers 200. Used as a context manager it starts, and stops at the end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log_path: Path,
        *,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        health: str = "/health",
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.name, self.command, self.port, self.host, self.health = name, list(command), port, host, health
        self.env = dict(env or {})
        self.log = Log(log_path)
        self.grace = grace
        self.ready_after: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0.0

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """The keeper's process id; the server's own is `main_pid`."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def main_pid(self) -> int | None:
        """The server's own process id, or None when it is gone."""
        return next(iter(children(self.pid)), None)

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begin

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n when signal n ended it."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start it. Raises ServerError when its port is taken, since /health would then be somebody else's."""
        if not port_is_free(self.port, self.host):
            raise ServerError(self, f"expected port {self.port} to be free, found a listener; choose another")
        self.log.path.parent.mkdir(parents=True, exist_ok=True)
        keeper_command = [sys.executable, "-I", "-S", keeper.__file__, str(self.grace), str(os.getpid()), "--"]
        self._begin, self.ready_after = time.monotonic(), None
        with self.log.path.open("wb") as out:
            self._process = subprocess.Popen(
                [*keeper_command, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        self.log = Log(self.log.path)

    def is_ready(self) -> bool:
        """Whether it answers 200 now. Raises ServerDied when its process has ended."""
        self.log.new_lines()
        self.check()
        ready = get_status(self.host, self.port, self.health) == 200
        if ready and self.ready_after is None:
            self.ready_after = self.seconds
        return ready

    def check(self) -> None:
        """Raise ServerDied when the process has ended."""
        if (code := self.exit_code) is not None:
            self.log.new_lines()
            raise ServerDied(self, f"ended with {describe_exit(code)}{self._first_error()}")

    def wait_ready(self, timeout: float = 600.0) -> None:
        """Wait until it answers. Raises ServerDied or ServerSlow."""
        wait_all([self], timeout)

    def send(self, number: int) -> None:
        """A signal to the server's main process alone."""
        if (pid := self.main_pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def request_stop(self) -> None:
        """Ask it to end, without waiting; a second request ends it at once."""
        self._signal_keeper(signal.SIGTERM)

    def stop(self) -> int | None:
        """End it and all its processes; returns when nothing is left, after `grace` seconds and a little at most."""
        if self._process is None:
            return None
        self.request_stop()
        return self._wait(self.grace + 5)

    def kill(self) -> int | None:
        """SIGKILL to every process of it."""
        if self._process is None:
            return None
        self._signal_keeper(signal.SIGQUIT)
        return self._wait(10)

    def _signal_keeper(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self, timeout: float) -> int | None:
        assert self._process is not None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.log.new_lines()
        return code

    def _first_error(self) -> str:
        error = self.log.own_error or self.log.first_error
        return f": {error}" if error else ""


def wait_all(
    servers: Iterable[Server],
    timeout: float,
    watch: Callable[[Server, bool], None] = lambda server, ready: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until every server is ready, or `interrupted()` is true; `watch(server, ready)` is called at every look.

    Raises ServerDied as soon as one ends, ServerSlow when `timeout` seconds have passed.
    """
    servers = list(servers)
    waiting = dict.fromkeys(servers)
    deadline = time.monotonic() + timeout
    while waiting and not interrupted():
        for server in servers:
            server.check()
            if server in waiting and server.is_ready():
                del waiting[server]
            watch(server, server not in waiting)
        if waiting and time.monotonic() > deadline:
            slow = next(iter(waiting))
            raise ServerSlow(
                slow,
                f"expected {slow.url}{slow.health} to answer 200 within {timeout:.0f} s, found it still "
                f"'{slow.log.stage}'{slow._first_error()}; its log is {slow.log.path}",
            )
        if waiting:
            time.sleep(POLL_SECONDS)


def stop_all(servers: Sequence[Server]) -> None:
    """End all at the same time, and wait for all."""
    for server in servers:
        server.request_stop()
    for server in servers:
        if server._process is not None:
            server._wait(server.grace + 5)


def describe_exit(code: int) -> str:
    """`exit code 1`, or `signal 9 (SIGKILL)`."""
    number = -code if code < 0 else code - 128  # negative: of a child of ours that isn't below a keeper
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"signal {number} ({signal.Signals(number).name})"
    return f"exit code {code}"


def tree_cpu_seconds(pid: int) -> float:
    """CPU time that `pid` and its living descendants have used, in seconds."""
    parents: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry))
                used[int(entry)] = int(fields[11]) + int(fields[12])
    ticks, todo = 0, [pid]
    while todo:
        one = todo.pop()
        ticks += used.get(one, 0)
        todo += parents.get(one, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The process ids of the direct children of `pid`, oldest first."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
                if int(fields[1]) == pid and fields[0] != b"Z":
                    found.append((int(fields[19]), int(entry)))
    return [child for _, child in sorted(found)]


def get_status(host: str, port: int, path: str, timeout: float = 2.0) -> int | None:
    """The HTTP status of a GET, or None when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # an address of another network namespace, or of none
    return True


def free_port(avoid: Iterable[int] = ()) -> int:
    """A port that nobody listens on now, below those that the kernel gives to outgoing connections.

    A server binds its port long after it was chosen: one of the kernel's own could be taken by any connection until
    then, even by the one that asks whether the server is there.
    """
    avoid = set(avoid)
    for _ in range(1000):
        port = random.randrange(*SERVER_PORTS)
        if port not in avoid and port_is_free(port):
            return port
    raise OSError(f"expected a free port from {SERVER_PORTS[0]} to {SERVER_PORTS[1] - 1}, found none")
