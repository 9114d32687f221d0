"""Reading a vLLM server's log while it grows: its lines, the stage it is in, what went wrong."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(
    r"^(?:\((?P<process>[^)]*)\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ "
    r"\[(?P<where>[^\]]*)\] (?P<text>.*)$"
)
UVICORN = re.compile(r"^(?:\((?P<process>[^)]*)\) )?(?P<level>INFO|WARNING|ERROR|CRITICAL):\s+(?P<text>.*)$")
THROUGHPUT = re.compile(r"Avg prompt throughput: .*")
EXCEPTION = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^\]]*\] )?(?P<text>[A-Za-z_.]*(?:Error|Exception|Interrupt)\b.*)$"
)
# What afdpatch itself says: its command line's line, or an error of afdpatch.runtime.connectors.base by its name.
OWN = re.compile(
    r"^(?:\([^)]*\) )?(?:(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] )?(?P<text>afdpatch: error: .*"
    r"|(?:afdpatch\.[A-Za-z_.]*\.)?(?:ConnectorError|InvalidHop|PeerLost|HopTimeout|FfnError|ConnectTimeout|AddressInUse"
    r"|ConnectionRefused|GreetingMismatch|Unreachable|NoFfnServer|OwnerEnded|StatusPageError|ConfigError|PatchError)"
    r"(?::.*)?"
    r"|afdpatch\.[A-Za-z_.]+: .*)$"
)
# uvicorn's list of routes, and its line for every look at the server: no help where something failed.
NOISE = re.compile(r'Route: /|"GET /(?:health|metrics|ping|load)[ ?/]|Available routes are')
IDLE = re.compile(r"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s")

# What a line says about where the start has got to; the first that matches counts.
STAGES = (
    (re.compile(r"version \d|non-default args"), "reading the configuration"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
    (re.compile(r"OpenMP thread binding"), "starting the worker"),
    (re.compile(r"[Ww]aiting for .*(peer|ffn|FFN|attention)"), "waiting for its peer"),
    (re.compile(r"Starting to load model|Loading (weights|safetensors)"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "weights are loaded"),
    (re.compile(r"Warming up|Compiling a graph"), "warming up"),
    (re.compile(r"GPU KV cache size|KV cache on|for KV cache"), "making the KV cache"),
    (re.compile(r"init engine .* took|Starting vLLM server|Supported tasks|Available routes"), "starting HTTP"),
    (re.compile(r"Application startup complete"), "ready"),
)


class Entry(NamedTuple):
    """One line of a log: `level` and `process` are empty where the line has none (a traceback, a print)."""

    level: str
    process: str
    text: str


def parse(line: str) -> Entry:
    """A line of vLLM's or uvicorn's log, or anything else."""
    found = LINE.match(line) or UVICORN.match(line)
    if not found:
        return Entry("", "", line)
    return Entry(found["level"], found["process"] or "", found["text"])


def throughput(entry: Entry) -> str | None:
    """vLLM's own line of rates, without its prefix; None for any other line, and while nothing is computed."""
    found = THROUGHPUT.search(entry.text)
    return found[0] if found and entry.level == "INFO" and not IDLE.match(found[0]) else None


class Log:
    """A log file that another process writes; `new_lines` reads what has come since the last call."""

    def __init__(self, path: Path, keep: int = 200) -> None:
        self.path = path
        self.stage = "starting"
        self.first_error: str | None = None
        self.own_error: str | None = None
        self._tail: deque[str] = deque(maxlen=keep)
        self._position = 0
        self._half = b""

    def new_lines(self) -> list[Entry]:
        """The whole lines since the last call; `stage`, `first_error` and `own_error` follow them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._position += len(chunk)
        *whole, self._half = (self._half + chunk).split(b"\n")
        entries = []
        for raw in whole:
            line = raw.decode(errors="replace").rstrip()
            if not NOISE.search(line):
                self._tail.append(line)
            entry = parse(line)
            self._note(line, entry)
            entries.append(entry)
        return entries

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines that `new_lines` has seen, without routes and looks at the server's health."""
        return list(self._tail)[-lines:]

    def _note(self, line: str, entry: Entry) -> None:
        if entry.level in ("INFO", "WARNING"):
            for pattern, stage in STAGES:
                if pattern.search(entry.text):
                    self.stage = stage
                    return
        if self.own_error is None and (found := OWN.match(line)):
            self.own_error = found["text"].strip()
        if self.first_error is None and (found := EXCEPTION.match(line)):
            self.first_error = found["text"].strip()


class Burst:
    """Lets at most `limit` lines through until `quiet` seconds pass without one, and counts the others."""

    def __init__(self, limit: int = 20, quiet: float = 2.0) -> None:
        self.limit, self.quiet = limit, quiet
        self._lines = 0
        self._last = float("-inf")

    def admits(self, now: float) -> bool:
        """Whether one more line, at `now` seconds, is let through; ask `held` before, which ends a burst."""
        self._lines += 1
        self._last = now
        return self._lines <= self.limit

    def held(self, now: float) -> int:
        """How many lines were held back by a burst that is over at `now`; each is counted once."""
        if now - self._last < self.quiet:
            return 0
        held, self._lines = max(self._lines - self.limit, 0), 0
        return held
