"""What a command tells while servers start, run and stop: events, shown to a person or printed as JSON lines."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from afdpatch.cli.servers import Server, ServerDied, ServerError, describe_exit, stop_all, wait_all

LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


class Reporter(Protocol):
    """Takes events; each has a name and fields that JSON can hold."""

    def event(self, name: str, **fields: Any) -> None: ...

    def starting(self, servers: Sequence[Server]) -> contextlib.AbstractContextManager[None]:
        """Around a start, for a display that moves."""


class JsonReporter:
    """One JSON object a line on stdout: `event`, `time` (seconds since the epoch), and the event's fields."""

    def event(self, name: str, **fields: Any) -> None:
        print(json.dumps({"event": name, "time": round(time.time(), 3), **fields}), flush=True)

    def starting(self, servers: Sequence[Server]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class TextReporter:
    """For a person: a table that moves on a terminal, a line a change elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def event(self, name: str, **fields: Any) -> None:
        if show := getattr(self, f"_{name}", None):
            show(**fields)

    @contextlib.contextmanager
    def starting(self, servers: Sequence[Server]) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        spinners = {server.name: Spinner("dots") for server in servers}
        with Live(
            get_renderable=lambda: progress_table(servers, spinners),
            console=self.console,
            refresh_per_second=8,
            transient=True,
        ):
            yield

    def print(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def _stage(self, server: str, stage: str, seconds: float) -> None:
        if not self.console.is_terminal:
            self.print(f"{server:<10} {seconds:6.1f} s  {stage}")

    def _ready(self, server: str, seconds: float, url: str) -> None:
        self.print(f"{server:<10} ready after {seconds:.1f} s at {url}", "green")

    def _note(self, text: str) -> None:
        self.print(text, "dim")

    def _log(self, server: str, level: str, text: str) -> None:
        self.print(f"{server:<10} {level:<8} {text}", LEVEL_STYLES.get(level, ""))

    def _more(self, server: str, lines: int, log: str) -> None:
        self.print(f"{server:<10} {lines} more in {log}", "dim")

    def _rate(self, server: str, text: str) -> None:
        self.print(f"{server:<10} {text}", "cyan")

    def _health(self, server: str, ok: bool, status: int | None) -> None:
        found = "healthy again" if ok else f"not healthy: /health answers {status or 'nothing'}"
        self.print(f"{server:<10} {found}", "green" if ok else "bold red")

    def _failed(
        self,
        server: str,
        message: str,
        exit_code: int | None,
        own_error: str | None,
        first_error: str | None,
        tail: list[str],
        log: str,
    ) -> None:
        self.print(f"error: {message}", "bold red")
        if own_error and first_error and first_error != own_error:
            self.print(f"the first exception: {first_error}", "red")
        if tail:
            self.print(f"the last lines of {log}:")
            for line in tail:
                self.print(f"  {line}", "dim")

    def _stopping(self, reason: str) -> None:
        self.print(f"stopping ({reason})")

    def _stopped(self, server: str, exit_code: int | None) -> None:
        self.print(f"{server:<10} stopped ({describe_exit(exit_code) if exit_code is not None else 'was not started'})")


def make_reporter(form: str) -> Reporter:
    """`json` or `text`."""
    return JsonReporter() if form == "json" else TextReporter()


def progress_table(servers: Sequence[Server], spinners: dict[str, Spinner]) -> Table:
    """A row a server: what it does, since when."""
    table = Table.grid(padding=(0, 2))
    for server in servers:
        ready = server.ready_after is not None
        table.add_row(
            Text("✓", "green") if ready else spinners[server.name],
            Text(server.name, "bold"),
            Text(f"{server.ready_after or server.seconds:.0f} s", "dim"),
            Text("ready" if ready else server.log.stage),
            Text(str(server.log.path), "dim"),
        )
    return table


def bring_up(
    servers: Sequence[Server],
    timeout: float,
    reporter: Reporter,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Start all at once and wait until all answer, or `interrupted()`; what they do is reported.

    Raises ServerError, with the failure already reported; the caller stops the servers.
    """
    seen: dict[str, str] = {}

    def watch(server: Server, ready: bool) -> None:
        stage = "ready" if ready else server.log.stage
        if seen.get(server.name) == stage or (stage == "ready") != ready:
            return
        seen[server.name] = stage
        if ready:
            reporter.event("ready", server=server.name, seconds=round(server.ready_after or 0.0, 1), url=server.url)
        else:
            reporter.event("stage", server=server.name, stage=stage, seconds=round(server.seconds, 1))

    try:
        for server in servers:
            server.start()
            reporter.event(
                "started",
                server=server.name,
                pid=server.pid,
                port=server.port,
                log=str(server.log.path),
                command=server.command,
                env=server.env,
            )
        with reporter.starting(servers):
            wait_all(servers, timeout, watch, interrupted)
    except ServerError as error:
        report_failure(error, reporter)
        raise


def report_failure(error: ServerError, reporter: Reporter) -> None:
    """Say what failed, with the end of the server's log."""
    server = error.server
    reporter.event(
        "failed",
        server=server.name,
        message=str(error),
        exit_code=server.exit_code,
        own_error=server.log.own_error,
        first_error=server.log.first_error,
        tail=server.log.tail(20) if isinstance(error, ServerDied) else [],
        log=str(server.log.path),
    )


def take_down(servers: Sequence[Server], reporter: Reporter, reason: str) -> None:
    """Stop all that run, and say how each ended."""
    running = [server for server in servers if server.started and server.exit_code is None]
    if running:
        reporter.event("stopping", reason=reason)
        stop_all(running)
    for server in running:
        reporter.event("stopped", server=server.name, exit_code=server.exit_code)


class Interrupt:
    """While open, SIGINT, SIGTERM and SIGHUP only set `name`; from the second one on `again` is called as well."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, again: Callable[[], None] = lambda: None) -> None:
        self.name: str | None = None
        self._again = again

    def __call__(self) -> bool:
        return self.name is not None

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            self._again()
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def terminate_as_interrupt() -> None:
    """Let SIGTERM raise KeyboardInterrupt, so that `finally` blocks stop the servers."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
