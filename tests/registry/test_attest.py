"""Every process attests: exec, fork, spawn and forkserver; a server isn't ready when one is missing or differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from afdpatch.registry import NotInEffect, PatchError
from afdpatch.registry.attest import ENVIRONMENT_KEY, Attestation, Roll, disagreements, start_method
from tests.registry.conftest import World

SERVER: dict[str, Any] = {
    "role": "red",
    "digest": "d" * 64,
    "expected": {"api": 1, "worker": 2},
    "used": {"worker": ["a", "b"], "api": ["a"]},
}


def said(process: str = "worker", pid: int = 1, **changes: Any) -> Attestation:
    base: dict[str, Any] = {
        "role": "red",
        "process": process,
        "processes": [process],
        "pid": pid,
        "start_method": "spawn",
        "digest": "d" * 64,
        "failure": None,
        "states": {"a": "applied", "b": "checked", "c": "idle"},
    }
    return Attestation(**base | changes)


WHOLE = [said("api", 1), said(pid=2), said(pid=3)]


def test_a_whole_server_has_no_trouble() -> None:
    assert list(disagreements(WHOLE, **SERVER)) == []


def test_an_armed_entry_whose_module_a_process_never_imports_is_no_trouble() -> None:
    assert list(disagreements([*WHOLE[:2], said(pid=3, states={"a": "pending", "b": "checked"})], **SERVER)) == []


TROUBLES: dict[str, tuple[list[Attestation], str]] = {
    "none": ([], r"api: 0 of 1 .*worker: 0 of 2"),
    "one missing": (WHOLE[:2], r"^worker: 1 of 2 processes"),
    "one process twice": ([*WHOLE[:2], said(pid=2)], "worker: 1 of 2"),
    "another digest": ([*WHOLE[:2], said(pid=3, digest="e" * 64)], r"worker \(pid 3, spawn\) has the manifest eeee"),
    "another role": ([*WHOLE[:2], said(pid=3, role="blue")], "role blue, not red"),
    "a failure": ([*WHOLE[:2], said(pid=3, failure="it broke")], r"worker \(pid 3, spawn\) failed: it broke"),
    "lost": ([*WHOLE[:2], said(pid=3, states={"a": "lost", "b": "applied"})], r"pid 3.*'a' is lost"),
    "lost, and not used there": ([said("api", 1, states={"a": "applied", "x": "lost"}), *WHOLE[1:]], "'x' is lost"),
    "idle": ([*WHOLE[:2], said(pid=3, states={"a": "idle", "b": "applied"})], "'a' is idle"),
    "an entry it doesn't know": ([*WHOLE[:2], said(pid=3, states={"a": "applied"})], "'b' is absent"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_process_that_is_missing_or_differs_is_named(name: str) -> None:
    items, words = TROUBLES[name]
    roll = Roll.create("test", **SERVER)
    for item in items:
        roll.sign(item)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(roll.trouble())
    roll.close()


def test_the_last_word_of_a_process_counts() -> None:
    roll = Roll.create("test", **SERVER)
    for item in [*WHOLE, said(pid=3, failure="late"), said(pid=3)]:
        roll.sign(item)
    assert roll.trouble() is None
    assert [item.pid for item in roll.attestations()] == [1, 2, 3]
    roll.sign(said(pid=3, failure="late"))
    assert "late" in str(roll.trouble())


def test_a_roll_that_is_gone_or_damaged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_KEY, raising=False)
    assert Roll.from_environment() is None
    monkeypatch.setenv(ENVIRONMENT_KEY, "/proc/1/fd/99999")
    with pytest.raises(NotInEffect, match="restart the server"):
        Roll.from_environment()
    roll = Roll.create("test", **SERVER)
    roll.sign({"pid": 1})
    with pytest.raises(PatchError, match="damaged"):
        roll.trouble()


CHILD = """
import os

def sign(break_it=False):
    import OURS
    from afdpatch.registry.attest import Roll
    import PKG.core
    OURS.the_set.apply(role="red", process="worker")
    if break_it:
        PKG.core.free = print
    roll = Roll.from_environment()
    roll.sign(OURS.the_set.attest())
    roll.close()
"""
MAIN = """
import json, multiprocessing, os, sys
from afdpatch.registry.attest import ENVIRONMENT_KEY, Roll

if __name__ == "__main__":
    import OURS
    import OURS.child
    import PKG.core
    OURS.the_set.apply(role="red", process="api")
    p = OURS.the_set
    methods = sys.argv[1:]
    roll = Roll.create("t", role="red", digest=p.digest, expected={"api": 1, "worker": len(methods)},
                       used=p.used("red"))
    os.environ[ENVIRONMENT_KEY] = roll.path
    roll.sign(p.attest())
    out = [roll.trouble()]
    for method in methods:
        child = multiprocessing.get_context(method).Process(target=OURS.child.sign)
        child.start(); child.join(60)
        assert child.exitcode == 0, (method, child.exitcode)
        out.append(roll.trouble())
    child = multiprocessing.get_context(methods[0]).Process(target=OURS.child.sign, args=(True,))
    child.start(); child.join(60)
    out.append(roll.trouble())
    print(json.dumps([out, [[a.process, a.start_method, a.pid != os.getpid()] for a in roll.attestations()]]))
"""


def test_forked_spawned_and_forkserved_processes_attest(world: World) -> None:
    world.write(
        f"{world.ours}/__init__.py", "from afdpatch.registry import PatchSet\nthe_set = PatchSet.load('OURS')\n"
    )
    world.write(f"{world.ours}/child.py", CHILD)
    world.patchset(world.entry(processes=["api", "worker"]), world.entry("PKG.core:Engine.run", when="always"))
    main = world.write("main.py", MAIN)
    done = subprocess.run(
        [sys.executable, str(main), "fork", "spawn", "forkserver"],
        env={**os.environ, "PYTHONPATH": f"{world.site}{os.pathsep}{os.pathsep.join(sys.path)}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    troubles, processes = json.loads(done.stdout)
    for index, trouble in enumerate(troubles[:3]):
        assert trouble == f"worker: {index} of 3 processes have attested their patches"
    assert troubles[3] is None
    assert "patch 'core.free' is lost" in troubles[4]
    assert [item[:2] for item in processes] == [
        ["api", "exec"],
        ["worker", "fork"],
        ["worker", "spawn"],
        ["worker", "forkserver"],
        ["worker", "fork"],
    ]


def test_this_process_was_not_started_by_multiprocessing() -> None:
    assert start_method() == "exec"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_forked_in_the_middle_of_a_call_fails_at_once(world: World) -> None:
    source = """
    import threading
    begun, go_on = threading.Event(), threading.Event()
    def free(original):
        begun.set()
        go_on.wait(30)
        return lambda x, scale=2: ("ours", original(x, scale))
    """
    world.write(f"{world.ours}/slow.py", source)
    patches = world.patchset(world.entry(replacement="OURS.slow:free"))
    slow = world.load("OURS.slow")
    thread = threading.Thread(target=patches.apply, kwargs={"role": "red", "process": "worker"}, daemon=True)
    thread.start()
    assert slow.begun.wait(30)
    child = os.fork()
    if child == 0:
        try:
            patches.apply(role="red", process="worker")
        except PatchError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    slow.go_on.set()
    thread.join(30)
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("the forked process hangs")
    assert os.waitstatus_to_exitcode(status) == 7
    patches.require()
    patches.undo()
