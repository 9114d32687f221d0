"""What is wrong with servers that were looked at, and what to do about it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from afdpatch.cli import look
from afdpatch.cli.look import Seen
from afdpatch.runtime.config import ConfigError
from afdpatch.runtime.secret import read_secret

SEVERITIES = ("error", "warning", "note")
STALE_S = 5.0
WAITING_S = 10.0


class Finding(NamedTuple):
    """One line: how bad, where, what was found, what to do."""

    severity: str
    where: str
    found: str
    advice: str


def of_servers(seen: Sequence[Seen]) -> list[Finding]:
    """Everything that is wrong with servers of one cluster."""
    found: list[Finding] = []
    for server in seen:
        found += of_server(server)
    return [*found, *of_roles(seen), *of_patches(seen), *of_cores(seen), *of_waiting(seen)]


def of_server(server: Seen) -> Iterable[Finding]:
    """What is wrong with one server by itself."""
    if server.problem is not None:
        yield Finding("error", server.where, server.problem, problem_advice(server))
        return
    for worker in server.workers or []:
        yield from of_worker(f"{server.where} ({worker['role']} rank {worker['rank']})", worker, server.here)
    if server.health is not None and server.health[0] == 0:
        text = f"/health does not answer ({server.health[1]})"
        yield Finding("error", server.where, text, "its HTTP process hangs: look at its log, restart the server")
    elif server.health is not None and server.health[0] != 200 and "same patches" in server.health[1]:
        text = f"its processes don't have the same patches: {server.health[1][-300:]}"
        yield Finding("error", server.where, text, "one of them was started by hand or hurt: restart the server")


def problem_advice(server: Seen) -> str:
    """What to do about a server that told nothing."""
    if "orphaned" in (server.problem or ""):
        return "the server's first process is gone and these still run: end them (kill -9), then start the server again"
    if "as an AFD server" in (server.problem or ""):
        return "is it a vLLM without a role, or an older afdpatch? give the URLs of the pair's servers"
    return "is it started, and is this its port? run afdpatch doctor without URLs on its host, or --log with its log"


def of_worker(where: str, worker: dict[str, Any], here: bool) -> Iterable[Finding]:
    """What is wrong with one worker, by its status page."""
    last = f" (last error: {worker['last_error']})" if worker["last_error"] else ""
    state, age, pid = worker["state"], worker["heartbeat_age_s"], worker["worker_pid"]
    if here and pid and not look.alive(pid):
        yield Finding("error", where, f"its worker process {pid} has ended{last}", "see its log, restart the server")
        return
    if state == "failed":
        yield Finding("error", where, f"failed{last}", "it can't go on: see its log, restart the server")
        return
    if state == "stopped":
        yield Finding("error", where, "is stopped", "start the server again")
        return
    if age is not None and age > STALE_S:
        text = f"no sign of life for {age:.0f} s from its worker {pid}{last}"
        advice = f"it hangs or was stopped: py-spy dump --pid {pid} shows where, kill -CONT {pid} wakes a stopped one"
        yield Finding("error", where, text, f"{advice}; else restart the server")
    if mismatch := re.search(r"doesn't fit[^;]*: .*", worker["last_error"]):
        yield Finding("error", where, f"refused: {mismatch[0]}", "start both roles with the same model and settings")
    if state in ("starting", "loading"):
        waits = (
            worker["role"] == "attention"
            and state == "loading"
            and worker["peer_state"] in ("none", "waiting")
            and not worker["peers"]
        )
        text = f"is {state}" + (", and no FFN server has answered it" if waits else "") + last
        advice = "start the FFN server with the same --afd-host and --afd-port" if waits else "wait; its log says more"
        yield Finding("warning" if waits else "note", where, text, advice)
    else:
        yield from of_peers(where, worker, last)
    if worker["role"] == "ffn" and worker["draining"]:
        text = f"drains, {worker['peers']} peer(s) left"
        yield Finding("warning", where, text, "stop it for its restart, or afdpatch drain URL --resume")
    elif worker["drain_requested"] and not worker["draining"] and worker["role"] == "ffn" and worker["peers"]:
        yield Finding("warning", where, "was asked to drain and doesn't", "its loop hangs: see its heartbeat and log")
    yield from of_events(where, worker, last)


def of_peers(where: str, worker: dict[str, Any], last: str) -> Iterable[Finding]:
    """How a worker that has loaded stands with its peers."""
    state = worker["peer_state"]
    if state == "given_up":
        text = f"gave up on its FFN servers, requests fail{last}"
        yield Finding(
            "error", where, text, "start an FFN server again with the same port and rank; it returns by itself"
        )
    elif state == "lost":
        text = f"its FFN server is lost, hops wait{last}"
        yield Finding("error", where, text, "restart that FFN server before recovery_timeout_s is over")
    elif state == "waiting":
        text = f"its FFN server is not connected{last}"
        yield Finding("error", where, text, "start the FFN server; are --afd-host and --afd-port the same on both?")
    elif worker["role"] == "ffn" and not worker["peers"] and not worker["draining"]:
        text = "no attention server is connected"
        yield Finding("warning", where, text, "start one with the same --afd-host and --afd-port, or is it lost?")


def of_events(where: str, worker: dict[str, Any], last: str) -> Iterable[Finding]:
    """What has happened since the start and needs a look."""
    events = worker["events"]
    if events["peers_refused"]:
        text = f"{events['peers_refused']} connection(s) were refused{last}"
        yield Finding("warning", where, text, "its log says whom and why (event=refused)")
    if events["messages_dropped"]:
        text = f"{events['messages_dropped']} message(s) were dropped: garbage, too large, replayed or out of order"
        yield Finding("warning", where, text, "who speaks at this port? the log says (event=dropped); set secret_file")
    if events["errors"]:
        yield Finding(
            "warning", where, f"{events['errors']} hop(s) failed{last}", "see the FFN server's log (event=error)"
        )
    lost, back = events["peers_lost"], events["peers_returned"]
    if lost and worker["role"] == "attention":
        text = f"{lost} connection(s) to FFN servers were lost since its start, {back} came back"
        yield Finding("note", where, text, "look for their reason (event=peer_lost) if you didn't restart one")
    if events["takeovers"]:
        text = f"{events['takeovers']} hop(s) went to FFN servers of other blocks"
        yield Finding("note", where, text, "its own one was away: expected in a rolling restart")


def of_roles(seen: Sequence[Seen]) -> Iterable[Finding]:
    """Whether both roles are there."""
    roles = {server.role for server in seen if server.role}
    if len(roles) != 1 or len(seen) < 2 or any(server.role is None for server in seen):
        return
    (role,) = roles
    other = "ffn" if role == "attention" else "attention"
    where = ", ".join(server.where for server in seen)
    text = f"all are {role} servers, none is an {other} server"
    yield Finding("warning", where, text, f"was one started with the wrong --role? give the {other} server's URL too")


def of_patches(seen: Sequence[Seen]) -> Iterable[Finding]:
    """Whether all processes of all servers have the same patches."""
    digests: dict[str, list[str]] = {}
    for server in seen:
        for worker in server.workers or []:
            if worker["manifest_digest"]:
                digests.setdefault(worker["manifest_digest"], []).append(f"{server.where} rank {worker['rank']}")
        for process in server.processes:
            if process.get("digest"):
                name = f"{server.where} {process.get('process')} {process.get('pid')}"
                digests.setdefault(str(process["digest"]), []).append(name)
    if len(digests) > 1:
        told = "; ".join(f"{digest[:12]}: {', '.join(who[:4])}" for digest, who in sorted(digests.items()))
        text = f"the patches differ ({told})"
        yield Finding("error", "all servers", text, "install one afdpatch everywhere and restart what differs")


def of_cores(seen: Sequence[Seen]) -> Iterable[Finding]:
    """Whether two workers of this machine have threads bound to one core."""
    bound = []
    for server in seen:
        for worker in (server.workers or []) if server.here else []:
            if pid := worker["worker_pid"]:
                bound.append((f"{worker['role']} rank {worker['rank']} (process {pid})", pid, look.bound_cores(pid)))
    for (one, first, cores), (other, second, others) in itertools.combinations(bound, 2):
        if first != second and (shared := cores & others):
            text = f"{one} and {other} both have threads bound to core {', '.join(map(str, sorted(shared)))}"
            advice = (
                "give each worker its own cores (VLLM_CPU_OMP_THREADS_BIND), or fewer workers: each waits for the other"
            )
            yield Finding("warning", "this machine", text, advice)


def of_waiting(seen: Sequence[Seen]) -> Iterable[Finding]:
    """Hops that wait at an FFN server, and peers that say nothing."""
    for server in seen:
        for worker in server.workers or []:
            where = f"{server.where} ({worker['role']} rank {worker['rank']})"
            if worker["queue"]:
                text = f"{worker['queue']} hop(s) wait here now: the attention servers wait for this FFN server"
                yield Finding("note", where, text, "if it is always so, give it more cores or add an FFN server")
            for peer in worker["peers_named"]:
                if peer["age_s"] > WAITING_S:
                    text = (
                        f"attention rank {peer['rank']} (process {peer['pid']}) says nothing for {peer['age_s']:.0f} s"
                    )
                    yield Finding("warning", where, text, "it hangs or was stopped: look at it")


# Logs and files

# What a log's own line means, and what to do; the first that matches counts.
CAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"GreetingMismatch|doesn't fit"), "start both roles with the same model, versions and settings"),
    (
        re.compile(r"AddressInUse|cannot listen at"),
        "end the other FFN server of this address, or choose another --afd-port",
    ),
    (re.compile(r"[Aa]ddress already in use|expected the port to be free"), "choose another --port, or end who has it"),
    (re.compile(r"secret"), "give all servers the same --secret-file: 16 to 4096 random bytes, mode 600"),
    (
        re.compile(r"ConnectTimeout|Unreachable"),
        "start the FFN server too; are --afd-host and --afd-port the same on both?",
    ),
    (re.compile(r"ConnectionRefused"), "read the reason: another program or another peer has this place"),
    (re.compile(r"NoFfnServer"), "start an FFN server again with the same port and rank"),
    (re.compile(r"OwnerEnded"), "the server's first process was killed: restart the server"),
    (re.compile(r"ConfigError|AFD configuration"), "correct this setting"),
    (re.compile(r"afdpatch: error|PatchError|drifted|vLLM"), "afdpatch verify says which patch doesn't fit this vLLM"),
    (
        re.compile(r"[Oo]ut of memory|Cannot allocate|No available memory|bad_alloc"),
        "set --kv-cache-memory-bytes lower",
    ),
)
LAST_LINES = 5


def of_log(path: Path) -> list[Finding]:
    """Why a server didn't start, by its log."""
    from afdpatch.cli.logs import Log

    if not path.is_file():
        return [
            Finding("error", str(path), "no such file", "give the log of a server: afdpatch up prints where they are")
        ]
    log = Log(path)
    log.new_lines()
    error = log.own_error or log.first_error
    if error is None:
        if log.stage == "ready":
            return [Finding("note", str(path), "the server came up, without an error", "ask it: afdpatch doctor URL")]
        last = next((line for line in reversed(log.tail(LAST_LINES)) if line.strip()), "nothing")
        text = f"no error, the server got to {log.stage!r}; its last line is: {last[:200]}"
        return [Finding("warning", str(path), text, "it still starts, or was killed: is its process there?")]
    advice = next((advice for cause, advice in CAUSES if cause.search(error)), "look there for the lines around it")
    severity = "warning" if log.stage == "ready" else "error"
    return [Finding(severity, str(path), f"at stage {log.stage!r}: {error[:400]}", advice)]


def of_secret(path: Path) -> list[Finding]:
    """Whether a shared secret can be used by this user."""
    try:
        read_secret(str(path))
    except ConfigError as error:
        make = f"head -c 32 /dev/urandom > {path}; chmod 600 {path}; the same file on every host"
        return [Finding("error", str(path), f"the secret can't be used: {error.found}", f"{error.allowed}; {make}")]
    return []
