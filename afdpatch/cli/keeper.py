"""Keep one server: start it, and see that nothing of it outlives it, nor outlives who asked for it.

    python keeper.py GRACE_SECONDS PARENT_PID -- COMMAND ...

A vLLM server is a tree of processes, and a parent that is killed can't end it. The keeper is a small process between
the two. It adopts whatever the server leaves behind (it is a child subreaper), so that every process of the tree is
its descendant, in whatever session or group it put itself. It ends the tree

- on SIGTERM or SIGINT: SIGTERM to the server; to all its processes after half of GRACE; SIGKILL to all after GRACE;
  a second one: SIGKILL to all;
- on SIGQUIT: SIGKILL to all, at once;
- when its parent dies, even by SIGKILL: as on SIGTERM;
- with PARENT_PID 0, where nobody but the terminal and the caller's shell is above it, not when its parent dies, but on
  a SIGHUP that isn't ignored (nohup ignores it), as on SIGTERM;
- when the server ends by itself and leaves processes: they get a second to go, then as above.

The server finds this process's id in the environment variable AFDPATCH_KEPT.

Exit code: the server's own; 128 + n when signal n ended it (with PARENT_PID 0, 130 when SIGINT was what asked for it);
127 when it could not be started. Linux only; standard library only, and run by its path with `python -I -S`, so that
it starts in an instant and costs a few megabytes.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
LEFTOVER_SECONDS = 1.0
MARK = "AFDPATCH_KEPT"


def main(argv: list[str]) -> int:
    grace, parent, command = float(argv[0]), int(argv[1]), argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # SIGHUP at the end of the parent's *thread* that started this: only a reason to look whether the parent is there.
    if parent:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGHUP), 0, 0, 0)
    ends = {signal.SIGTERM, signal.SIGINT}
    if not parent and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        ends.add(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    server = os.fork()
    if server == 0:
        become(command, libc)
    status = None
    asked_by = 0
    stop_at = group_at = kill_at = None  # when SIGTERM to the server, SIGTERM to its group and SIGKILL to all are due
    while True:
        received = signal.sigtimedwait(SIGNALS, 0.5)
        number = received.si_signo if received else 0
        now = time.monotonic()
        status, alone = reap(server, status)
        asked = number in ends
        if asked and kill_at is None:
            asked_by = number
        if number == signal.SIGQUIT or (asked and kill_at is not None):
            kill_at = now
        elif (asked or (parent and os.getppid() != parent)) and kill_at is None:
            stop_at, group_at, kill_at = now, now + grace / 2, now + grace
        if status is not None:
            if alone:
                if os.WIFEXITED(status):
                    return os.WEXITSTATUS(status)
                return 128 + (signal.SIGINT if not parent and asked_by == signal.SIGINT else os.WTERMSIG(status))
            if stop_at is None and group_at is None:
                group_at, kill_at = now + LEFTOVER_SECONDS, now + LEFTOVER_SECONDS + grace
        if stop_at is not None and now >= stop_at and status is None:
            send([server], signal.SIGTERM)
            stop_at = float("inf")
        if group_at is not None and now >= group_at:
            send(descendants(), signal.SIGTERM)
            group_at = float("inf")
        if kill_at is not None and now >= kill_at:
            send(descendants(), signal.SIGKILL)


def become(command: list[str], libc: ctypes.CDLL) -> None:
    """In the child: a session of its own, default signals, and the command. Doesn't return."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.environ[MARK] = str(os.getppid())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"ERROR: can't start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def reap(server: int, status: "int | None") -> "tuple[int | None, bool]":
    """Collect every child that has ended.

    Returns the server's wait status once it has, and whether there is no child any more. Who is left by a parent that
    ended is a child of this process at once, so that then there is no descendant either; a walk through /proc, which
    takes its time, can miss one.
    """
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, True
        if pid == 0:
            return status, False
        if pid == server:
            status = ended


def descendants() -> list[int]:
    """The process ids of every living descendant of this process, by /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b") ")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
