"""A patched module whose code runs again, by reload or a second import, is patched again, or fails loudly."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

import pytest

from afdpatch.registry import NotInEffect, PatchError, PatchSet, State, TargetDrifted
from tests.registry.conftest import Make, World


def again(world: World, how: str) -> ModuleType:
    core = world.load("PKG.core")
    if how == "reload":
        return importlib.reload(core)
    del sys.modules[core.__name__]
    return world.load("PKG.core")


def in_effect(patches: PatchSet) -> bool:
    return set(patches.states().values()) == {State.APPLIED}


HOW = pytest.mark.parametrize("how", ["reload", "anew"])


@HOW
@pytest.mark.parametrize("when", ["always", "role"])
@pytest.mark.parametrize("first", ["import", "patch"])
def test_every_target_is_patched_again(world: World, how: str, when: str, first: str) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\ndef use(): return free(1)\n")
    names = ("Engine.run", "Engine.make", "Engine.name")
    entries = [world.entry(f"PKG.core:{name}", when=when) for name in names]
    before = list(sys.meta_path)  # another set's may be there: this process's own vLLM is patched by some tests
    patches = world.patchset(world.entry(when=when, holders=["PKG.user"]), *entries)
    if first == "import":
        world.load("PKG.core")
    patches.arm()
    if when == "role":
        patches.apply(role="red", process="worker")
    user, old = world.load("PKG.user"), world.load("PKG.core")
    engine = old.Engine()
    for _ in range(3):
        core = again(world, how)
        assert core.free(1) == user.use() == ("ours", 8)
        assert core.Engine().run(1)[0] == core.Engine.make(1)[0] == core.Engine.name()[0] == "ours"
        assert core.free.__wrapped__ is patches.original("core.free") and not hasattr(
            core.free.__wrapped__, "__wrapped__"
        )
        assert engine.run(1)[0] == "ours", "what was made before keeps the old class, which stays patched"
        assert in_effect(patches)
    spec = core.__spec__
    assert spec is not None and spec.loader is core.__loader__ and type(spec.loader).__name__ == "SourceFileLoader"
    assert "def free" in inspect.getsource(core)
    originals = [patches.original(name) for name in ("core.free", "core.engine-run")]
    patches.undo()
    assert [core.free, core.Engine.run] == originals
    assert core.free(1) == user.use() == old.free(1) == 8
    assert (engine.run(1), core.Engine.make(1), core.Engine.name()) == (11, 11, "Engine")
    ours = [item for item in sys.meta_path if type(item).__module__ == "afdpatch.registry.hooks"]
    assert not [item for item in ours if item not in before]
    assert again(world, how).free(1) == 8


@HOW
def test_a_replaced_function_value_and_property_are_patched_again(world: World, how: str) -> None:
    world.write(f"{world.package}/core.py", "LIMIT = [1]\ndef free(x, scale=2): return 0\n")
    world.write(f"{world.ours}/more.py", "LIMIT = [2]\n")
    patches = world.patchset(
        world.entry(kind="replace", replacement="OURS.patches:replaced_free"),
        world.entry("PKG.core:LIMIT", kind="replace", replacement="OURS.more:LIMIT"),
    )
    patches.apply(role="red", process="worker")
    core = again(world, how)
    assert (core.free(1), core.LIMIT) == (("replaced", 1, 2), [2])
    assert in_effect(patches)
    patches.undo()
    assert (core.free(1), core.LIMIT) == (0, [1])


def test_a_reload_that_cannot_be_patched_again_fails_and_the_failure_stays(world: World) -> None:
    world.write(
        f"{world.ours}/once.py",
        "made = []\ndef free(o):\n    if made: raise OSError('once')\n"
        "    made.append(1)\n    return lambda x, scale=2: o(x, scale)\n",
    )
    patches = world.patchset(world.entry(replacement="OURS.once:free"), world.entry("PKG.core:Engine.run"))
    patches.apply(role="red", process="worker")
    core = world.load("PKG.core")
    for _ in range(2):
        with pytest.raises(PatchError, match="once"):
            importlib.reload(core)
    assert set(patches.states().values()) == {State.LOST}
    for call in (patches.require, patches.arm):
        with pytest.raises(PatchError, match="once"):
            call()
    now = core.free, core.Engine.run
    patches.undo()
    assert (core.free, core.Engine.run) == now, "what the reload made is what stays"
    assert core.free(1) == 8


def test_a_reload_of_changed_source_is_drift(world: World) -> None:
    patches = world.patchset(world.entry())
    patches.apply(role="red", process="worker")
    world.core("* scale\n", "* scale + 1\n")
    with pytest.raises(TargetDrifted):
        importlib.reload(world.load("PKG.core"))
    assert patches.states() == {"core.free": State.LOST}


def test_code_that_runs_again_past_the_hook_is_lost_and_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    patches = world.patchset(world.entry())
    patches.apply(role="red", process="worker")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [item for item in sys.meta_path if "afdpatch" not in type(item).__module__])
        again(world, "anew")
    assert patches.states() == {"core.free": State.LOST}
    with pytest.raises(NotInEffect, match="imported anew"):
        patches.require()


def test_several_sets_on_one_target_are_both_patched_again(world: World, make: Make) -> None:
    lower, upper = make("one", world.entry()), make("two", world.entry(id="theirs.free", after=["one/core.free"]))
    lower.apply(role="red", process="worker")
    upper.apply(role="red", process="worker")
    core = importlib.reload(world.load("PKG.core"))
    assert core.free(1) == ("ours", ("ours", 8))
    assert in_effect(lower) and in_effect(upper)
    upper.undo()
    assert core.free(1) == ("ours", 8)
    lower.undo()
    assert core.free(1) == 8


@HOW
def test_undo_after_a_failed_reload_leaves_no_module_with_ours(world: World, how: str) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    patches = world.patchset(world.entry(when="always", holders=["PKG.user"]))
    patches.arm()
    user = world.load("PKG.user")  # it imports ours: nothing of it was rebound
    assert user.free(1) == ("ours", 8)
    world.load("OURS.patches").free = world.load("OURS.patches").failing
    with pytest.raises(PatchError):
        again(world, how)
    patches.undo()
    assert user.free(1) == 8
