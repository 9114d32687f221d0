"""Somebody else changes a target: beneath ours, over ours, or past the hook."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from afdpatch.registry import Conflict, NotInEffect, State
from tests.registry.conftest import World, always

# ---- somebody else -------------------------------------------------------------------------------------------------


def foreign(kind: str, original: Any) -> Any:
    import functools

    import wrapt

    @functools.wraps(original)
    def closure(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    def free(x: Any, scale: Any = 2) -> Any:
        return None

    made = {"closure": closure, "wrapt": wrapt.FunctionWrapper(original, wrapper), "other": print, "namesake": free}
    return made[kind]


@pytest.mark.parametrize("kind", ["closure", "wrapt", "other", "namesake"])
def test_a_foreign_patch_is_a_conflict_that_names_its_module(world: World, kind: str) -> None:
    core = world.load("PKG.core")
    core.free = theirs = foreign(kind, core.free)
    patches = world.patchset(world.entry("PKG.core:Engine.run"), world.entry())
    run = core.Engine.run
    with pytest.raises(Conflict) as caught:
        patches.apply(role="red", process="worker")
    assert ("builtins" if kind == "other" else __name__) in str(caught.value)
    assert caught.value.exit_code == 5
    assert core.free is theirs
    assert core.Engine.run is run


def test_another_function_of_the_same_file_is_a_conflict(world: World) -> None:
    core = world.load("PKG.core")
    core.free = core.helper
    with pytest.raises(Conflict, match="helper"):
        world.patchset(world.entry()).apply(role="red", process="worker")


def test_the_package_s_own_decorator_is_no_foreign_patch_and_one_more_layer_is(world: World) -> None:
    source = """
    import functools
    def deco(f):
        @functools.wraps(f)
        def inner(*args, **kwargs):
            return f(*args, **kwargs)
        return inner
    """
    world.write(f"{world.package}/deco.py", source)
    world.core('def free(x, scale=2):\n    """A function', '@deco\ndef free(x, scale=2):\n    """A function')
    world.core("LIMIT = 3", "from .deco import deco\n\nLIMIT = 3")
    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    patches.apply(role="red", process="worker")
    assert core.free(1) == ("ours", 8)
    patches.undo()
    core.free = foreign("closure", core.free)
    with pytest.raises(Conflict):
        patches.apply(role="red", process="worker")


def test_what_is_taken_from_us_is_lost_and_required(world: World) -> None:
    patches = world.patchset(world.entry())
    with pytest.raises(NotInEffect, match="no role"):
        patches.require()
    patches.apply(role="red", process="worker")
    patches.require()
    core = world.load("PKG.core")
    ours = core.free
    core.free = foreign("closure", ours)
    assert patches.states() == {"core.free": State.LOST}
    with pytest.raises(NotInEffect, match=r"core\.free"):
        patches.require()
    core.free = ours
    patches.require()


def test_a_hook_that_never_fired_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    patches = world.patchset(always(world), world.entry("PKG.core:Engine.run"))
    patches.arm()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [item for item in sys.meta_path if "wrapt" not in type(item).__module__])
        core = world.load("PKG.core")
    assert core.free(1) == 8
    assert patches.states()["core.free"] is State.LOST
    with pytest.raises(NotInEffect, match=r"core\.free"):
        patches.apply(role="red", process="worker")
    assert core.Engine().run(1) == 11
