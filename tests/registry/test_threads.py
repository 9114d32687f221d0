"""Imports, arming and application by several threads at once."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest

from afdpatch.registry import State
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


def test_an_import_that_begins_while_the_hook_is_registered_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wrapt

    world.core("LIMIT = 3", "import OURS\nOURS.begun.set()\nOURS.go_on.wait(30)\nLIMIT = 3".replace("OURS", world.ours))
    patches = world.patchset(always(world))
    ours = world.load("OURS")
    ours.begun, ours.go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=world.load, args=("PKG.core",), daemon=True)
    real = wrapt.register_post_import_hook

    def register(hook: Any, name: str) -> None:
        thread.start()
        assert ours.begun.wait(30)
        real(hook, name)
        ours.go_on.set()

    monkeypatch.setattr(wrapt, "register_post_import_hook", register)
    patches.arm()
    thread.join(30)
    assert world.load("PKG.core").free(1) == ("ours", 8)
    assert patches.states() == {"core.free": State.APPLIED}


def test_an_import_past_the_hook_is_seen_when_it_is_registered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import wrapt

    patches = world.patchset(always(world))
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda hook, name: importlib.import_module(name))
    patches.arm()
    assert world.load("PKG.core").free(1) == ("ours", 8)
