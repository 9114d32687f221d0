"""Imports, arming and application by several threads at once."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

import pytest

from afdpatch.registry import Conflict, State
from tests.registry.conftest import World, always

HOLDER = "from PKG.core import free\nfrom PKG.core import free as alias\ndef use(): return free(1), alias(1)\n"


# ---- threads -------------------------------------------------------------------------------------------------------


def test_threads_that_import_arm_and_apply_at_once_end_with_the_set(world: World) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    patches = world.patchset(always(world, holders=["PKG.user"]), world.entry("PKG.core:Engine.run"))
    barrier = threading.Barrier(6)
    errors: list[Exception] = []

    def run(action: Any) -> None:
        barrier.wait()
        try:
            action()
        except Exception as error:
            errors.append(error)

    actions = [
        patches.arm,
        lambda: world.load("PKG.core"),
        lambda: world.load("PKG.user"),
        lambda: patches.apply(role="red", process="worker"),
        lambda: patches.apply(role="red", process="worker"),
        patches.arm,
    ]
    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    assert set(patches.states().values()) == {State.APPLIED}
    assert world.load("PKG.user").use() == (("ours", 8), ("ours", 8))


def begin_at_the_hook(thread: threading.Thread, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins its import just before the hook is registered, and goes on when it is."""
    import wrapt

    real = wrapt.register_post_import_hook

    def register(hook: Any, name: str) -> None:
        if thread.ident is None:
            thread.start()
            assert ours.begun.wait(30)
        real(hook, name)
        ours.go_on.set()

    monkeypatch.setattr(wrapt, "register_post_import_hook", register)


def test_an_import_that_begins_while_the_hook_is_registered_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.core("LIMIT = 3", "import OURS\nOURS.begun.set()\nOURS.go_on.wait(30)\nLIMIT = 3".replace("OURS", world.ours))
    patches = world.patchset(always(world))
    ours = world.load("OURS")
    ours.begun, ours.go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=world.load, args=("PKG.core",), daemon=True)
    begin_at_the_hook(thread, ours, monkeypatch)
    patches.arm()
    thread.join(30)
    assert world.load("PKG.core").free(1) == ("ours", 8)
    assert patches.states() == {"core.free": State.APPLIED}


def test_an_import_that_fails_while_the_hook_is_registered_leaves_a_hook_for_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.core("LIMIT = 3", f"import {world.ours} as o\no.begun.set()\no.go_on.wait(30)\no.first()\nLIMIT = 3")
    patches = world.patchset(always(world))
    ours = world.load("OURS")
    ours.begun, ours.go_on = threading.Event(), threading.Event()

    def fails() -> None:
        ours.first = int
        raise OSError("once")

    ours.first = fails

    def importing() -> None:
        with pytest.raises(OSError):
            world.load("PKG.core")

    thread = threading.Thread(target=importing, daemon=True)
    begin_at_the_hook(thread, ours, monkeypatch)
    patches.arm()
    thread.join(30)
    assert patches.states() == {"core.free": State.PENDING}
    assert world.load("PKG.core").free(1) == ("ours", 8)


def until_it_waits(thread: threading.Thread) -> None:
    """Until a thread waits for a lock of Python's imports, which the set's own lock is one of."""
    from _frozen_importlib import _blocking_on  # type: ignore[attr-defined]

    end, tick = time.monotonic() + 30, threading.Event()
    while not _blocking_on.get(thread.ident):
        assert time.monotonic() < end, f"{thread} waits for no module"
        tick.wait(0.005)


@pytest.mark.parametrize("first", ["apply", "import"])
@pytest.mark.parametrize("call", ["arm", "apply", "undo", "require"])
def test_a_module_that_calls_the_set_while_another_thread_s_call_waits_for_it_is_an_error(
    world: World, call: str, first: str
) -> None:
    # The other thread waits for a module that imports the one whose code calls the set; or is about to.
    world.write(f"{world.package}/inner.py", "import OURS\nOURS.call()\n")
    world.core("LIMIT = 3", f"import {world.package}.inner\nLIMIT = 3")
    install = world.entry(kind="install", replacement="OURS.patches:install", id="core.install")
    world.write(f"{world.ours}/patches.py", "import OURS\ndef install():\n    OURS.installing()\n    return int\n")
    patches = world.patchset(install)
    ours = world.load("OURS")
    calling, holding = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def quietly(action: Any) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    def called() -> None:  # in the import
        calling.set()
        assert holding.wait(30)
        if first == "apply":
            until_it_waits(applying)
        quietly(lambda: getattr(patches, call)(**({"role": "red", "process": "worker"} if call == "apply" else {})))

    def installing() -> None:  # in apply
        holding.set()
        if first == "import":
            until_it_waits(importing)
        world.load("PKG.core")

    ours.call, ours.installing = called, installing
    importing = threading.Thread(target=quietly, args=(lambda: world.load("PKG.core"),), daemon=True)
    importing.start()
    assert calling.wait(30)
    apply = {"role": "red", "process": "worker"}
    applying = threading.Thread(target=quietly, args=(lambda: patches.apply(**apply),), daemon=True)
    applying.start()
    for thread in (applying, importing):
        thread.join(30)
    assert not applying.is_alive() and not importing.is_alive()
    if first == "apply":
        assert [type(error) for error in errors] == [Conflict]
        assert "from within an import that another thread" in str(errors[0])
        assert patches.states() == {"core.install": State.APPLIED}
    else:
        assert "deadlock" in str(errors[0])


def test_an_import_past_the_hook_is_seen_when_it_is_registered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import wrapt

    patches = world.patchset(always(world))
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda hook, name: importlib.import_module(name))
    patches.arm()
    assert world.load("PKG.core").free(1) == ("ours", 8)
