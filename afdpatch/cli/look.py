"""What can be learned of AFD servers from outside: over HTTP, from /proc, from their status pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@dataclass
class Seen:
    """One server as it was found.

    `workers` has what each worker's status page says (`Snapshot.describe`); it is None when nobody told. `processes`
    has what each process has attested. `here`: whether its process ids are those of this machine.
    """

    where: str
    role: str | None = None
    problem: str | None = None
    health: tuple[int, str] | None = None
    workers: list[dict[str, Any]] | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)
    here: bool = False

    def pids(self) -> list[int]:
        """The processes that compute."""
        return [worker["worker_pid"] for worker in self.workers or [] if worker["worker_pid"]]


def ask(url: str, timeout: float) -> Seen:
    """Ask a server over HTTP."""
    from afdpatch.cli import client
    from afdpatch.runtime.owner import process_space

    seen = Seen(url)
    try:
        status = client.get_json(f"{url}/afd/status", None, timeout)
        seen.role, seen.workers = str(status["role"]), list(status["workers"])
        seen.here = bool(process_space()) and status["processes_of"] == process_space()
        seen.processes = list(client.get_json(f"{url}/afd/processes", None, timeout))
    except client.HttpError as error:
        seen.problem = f"answers, but not as an AFD server of this version: {str(error)[:200]}"
    except (OSError, http.client.HTTPException) as error:
        seen.problem = f"does not answer ({error or type(error).__name__})"
    except (ValueError, LookupError, TypeError) as error:
        seen.problem = f"answers, but not as an AFD server of this version ({type(error).__name__}: {error})"
    if seen.problem is None:
        seen.health = health(url, timeout)
    return seen


def health(url: str, timeout: float) -> tuple[int, str]:
    """The status of /health, and the reason where it gives one."""
    from afdpatch.cli import client

    try:
        client.request(f"{url}/health", None, timeout).close()
        return 200, ""
    except client.HttpError as error:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return error.status, str(json.loads(error.said)["reason"])
        return error.status, error.said
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__


def local_servers() -> list[Seen]:
    """The servers of this machine and user, by the status pages that their processes name."""
    from afdpatch.runtime.owner import PAGE_PATH
    from afdpatch.runtime.status import ENVIRONMENT_KEY, StatusPageError, StatusPages

    paths: dict[str, list[int]] = {}
    for pid in sorted(int(entry) for entry in os.listdir(PROC) if entry.isdigit()):
        # The page is opened for writing: nobody else may say which file that is, and nothing but a page's path will do.
        if is_own(pid) and PAGE_PATH.fullmatch(path := environment(pid).get(ENVIRONMENT_KEY, "")):
            paths.setdefault(path, []).append(pid)
    found = []
    for path, pids in paths.items():
        owner = path.split("/")[2]
        try:
            pages = StatusPages(path)
        except StatusPageError as error:
            if any(alive(pid) for pid in pids):
                listed = ", ".join(map(str, pids))
                found.append(Seen(f"process {listed}", problem=f"orphaned: {error}", here=True))
            continue
        now = time.monotonic()
        workers = [snapshot.describe(now) for snapshot in pages.snapshots()]
        pages.close()
        found.append(Seen(f"process {owner}", str(workers[0]["role"]), workers=workers, here=True))
    return sorted(found, key=lambda seen: (seen.role or "", seen.where))


def is_own(pid: int) -> bool:
    """Whether a process is this user's."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid)).stat().st_uid == os.getuid()
    return False


def environment(pid: int) -> Mapping[str, str]:
    """A process's environment as it was started; empty where it can't be read."""
    with contextlib.suppress(OSError):
        words = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.partition("=")[::2] for word in words)
    return {}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (OSError, IndexError):
        return False


def bound_cores(pid: int) -> set[int]:
    """The cores that a process's threads are bound to: those of each thread that may not run everywhere it could."""
    everywhere = machine_cores()
    cores: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                allowed = core_set((PROC / str(pid) / "task" / task / "status").read_text())
                if len(allowed) < len(everywhere):
                    cores |= allowed
    return cores


def machine_cores() -> set[int]:
    """The cores that this process could be given: those of process 1, which nobody binds, or its own."""
    with contextlib.suppress(OSError):
        if found := core_set((PROC / "1" / "status").read_text()):
            return found
    return set(os.sched_getaffinity(0))


def core_set(status: str) -> set[int]:
    """`Cpus_allowed_list` of a /proc/<pid>/status."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return read_cores(value.strip().split(","))
    return set()


def read_cores(parts: Sequence[str]) -> set[int]:
    """Cores as the kernel lists them: `0-3`, `6`."""
    cores: set[int] = set()
    for part in parts:
        first, _, last = part.partition("-")
        if first.isdigit():
            cores |= set(range(int(first), int(last or first) + 1))
    return cores
