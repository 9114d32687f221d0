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
    """vLLM's own line of rates, without its prefix, or None."""
    found = THROUGHPUT.search(entry.text)
    return found[0] if found and entry.level == "INFO" else None


class Log:
    """A log file that another process writes; `new_lines` reads what has come since the last call."""

    def __init__(self, path: Path, keep: int = 200) -> None:
        self.path = path
        self.stage = "starting"
        self.first_error: str | None = None
        self._tail: deque[str] = deque(maxlen=keep)
        self._position = 0
        self._half = b""

    def new_lines(self) -> list[Entry]:
        """The whole lines since the last call; `stage` and `first_error` follow them."""
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
            self._tail.append(line)
            entry = parse(line)
            self._note(line, entry)
            entries.append(entry)
        return entries

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines that `new_lines` has seen."""
        return list(self._tail)[-lines:]

    def _note(self, line: str, entry: Entry) -> None:
        if entry.level in ("INFO", "WARNING"):
            for pattern, stage in STAGES:
                if pattern.search(entry.text):
                    self.stage = stage
                    return
        if self.first_error is None and (found := EXCEPTION.match(line)):
            self.first_error = found["text"].strip()
