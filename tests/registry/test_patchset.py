"""A set in a process: arming, what is installed, roles and processes, releases."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys

import pytest

from afdpatch.registry import Conflict, NotInEffect, OtherVersion, PatchError, PatchSet, State, TargetDrifted
from tests.registry.conftest import World, always

# ---- arming and orders of import -----------------------------------------------------------------------------------


def test_an_armed_entry_waits_for_its_module_and_imports_nothing(world: World) -> None:
    patches = world.patchset(always(world))
    patches.arm()
    assert patches.states() == {"core.free": State.PENDING}
    assert not [name for name in sys.modules if name.startswith((world.package, f"{world.ours}."))]
    core = world.load("PKG.core")
    assert core.free(1) == ("ours", 8)
    assert patches.states() == {"core.free": State.APPLIED}


def test_an_armed_entry_is_applied_at_once_if_its_module_is_imported(world: World) -> None:
    core = world.load("PKG.core")
    world.patchset(always(world)).arm()
    assert core.free(1) == ("ours", 8)


def test_arming_twice_is_arming_once(world: World) -> None:
    core = world.load("PKG.core")
    patches = world.patchset(always(world))
    patches.arm()
    first = core.free
    patches.arm()
    assert core.free is first
    assert core.free(1) == ("ours", 8)


def test_arming_twice_before_the_import_is_arming_once(world: World) -> None:
    patches = world.patchset(always(world))
    patches.arm()
    patches.arm()
    assert world.load("PKG.core").free(1) == ("ours", 8)


def test_official_entries_are_checked_and_not_imported(world: World) -> None:
    patches = world.patchset(always(world, kind="official"), world.entry("PKG.core:Engine.run", kind="official"))
    patches.arm()
    assert patches.states() == {"core.free": State.CHECKED, "core.engine-run": State.IDLE}
    patches.apply(role="red", process="worker")
    assert patches.states()["core.engine-run"] is State.CHECKED
    assert f"{world.package}.core" not in sys.modules


def test_import_hooks_leave_the_module_s_loader_and_source_as_they_are(world: World) -> None:
    world.patchset(always(world)).arm()
    core = world.load("PKG.core")
    assert type(core.__loader__).__name__ == "SourceFileLoader"
    assert core.__spec__ is not None and core.__spec__.loader is core.__loader__
    assert "def free" in inspect.getsource(core)


# ---- kinds ---------------------------------------------------------------------------------------------------------


def test_methods_keep_their_descriptor_kind(world: World) -> None:
    patches = world.patchset(*(world.entry(f"PKG.core:Engine.{name}") for name in ("run", "make", "name")))
    core = world.load("PKG.core")
    before = {name: vars(core.Engine)[name] for name in ("run", "make", "name")}
    patches.apply(role="red", process="worker")
    sub = type("Sub", (core.Engine,), {"again": lambda self: super(sub, self).name("!")})
    assert [type(vars(core.Engine)[name]) for name in before] == [type(before[name]) for name in before]
    assert core.Engine.make(1) == core.Engine().make(1) == sub().make(1) == ("ours", 11)
    assert core.Engine.name("!") == core.Engine().name("!") == ("ours", "Engine!")
    assert sub.name("?") == ("ours", "Sub?")
    assert sub().again() == ("ours", "Sub!")
    assert core.Engine().run(1)[0] == "ours"
    patches.undo()
    assert all(vars(core.Engine)[name] is before[name] for name in before)


def test_a_wrapped_function_looks_like_the_original(world: World) -> None:
    patches = world.patchset(world.entry(), world.entry("PKG.core:Engine.run"))
    core = world.load("PKG.core")
    originals = core.free, core.Engine.run
    patches.apply(role="red", process="worker")
    for ours, original in zip((core.free, core.Engine.run), originals, strict=True):
        assert ours is not original
        assert type(ours) is type(original)
        assert inspect.signature(ours) == inspect.signature(original)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            assert getattr(ours, name) == getattr(original, name)
        assert ours.__wrapped__ is original
    assert pickle.loads(pickle.dumps(core.free)) is core.free


def test_a_replacement_keeps_its_own_name_and_pickles_by_it(world: World) -> None:
    patches = world.patchset(world.entry(kind="replace", replacement="OURS.patches:replaced_free"))
    patches.apply(role="red", process="worker")
    core = world.load("PKG.core")
    assert core.free(1) == ("replaced", 1, 2)
    assert core.free.__module__ == f"{world.ours}.patches"
    assert world.ours.encode() in pickle.dumps(core.free)
    assert pickle.loads(pickle.dumps(core.free)) is core.free
    assert patches.original("core.free")(1) == 8


def test_install_runs_and_is_undone(world: World) -> None:
    entry = world.entry(kind="install", replacement="OURS.patches:install")
    patches = world.patchset(entry)
    patches.apply(role="red", process="worker")
    log = world.load("OURS.patches").log
    assert log == ["installed"]
    patches.undo()
    assert log == ["installed", "removed"]


def test_an_inherited_target_gets_a_slot_that_undo_deletes(world: World) -> None:
    world.write(f"{world.package}/sub.py", "from .core import Engine\nclass Sub(Engine): ...\n")
    patches = world.patchset(world.entry("PKG.sub:Sub.run"))
    sub = world.load("PKG.sub").Sub
    patches.apply(role="red", process="worker")
    assert sub().run(1)[0] == "ours"
    assert world.load("PKG.core").Engine().run(1) == 11
    patches.undo()
    assert "run" not in vars(sub)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("def free(original):\n    return lambda x, scale: original(x, scale)", TargetDrifted, "x, scale=2"),
        ("def free(original):\n    return lambda x, scale=3: original(x, scale)", TargetDrifted, "scale=3"),
        ("def free(original):\n    return lambda *a, **k: original(*a, **k)", TargetDrifted, r"\*a, \*\*k"),
        ("def free(original):\n    return lambda y, scale=2: original(y, scale)", TargetDrifted, "y, scale=2"),
        ("def free(original):\n    return lambda x, *, scale=2: original(x, scale)", TargetDrifted, r"x, \*, scale=2"),
        ("def free(original):\n    async def f(x, scale=2): ...\n    return f", TargetDrifted, "coroutine function"),
        ("def free(original):\n    def f(x, scale=2): yield\n    return f", TargetDrifted, "generator function"),
        ("def free(original):\n    return original", PatchError, "returned the original"),
        ("def free(original):\n    return 1", PatchError, "not a plain function"),
        (
            "import wrapt\ndef free(original):\n    return wrapt.FunctionWrapper(original, print)",
            PatchError,
            "plain function",
        ),
        ("import functools\ndef free(o):\n    return functools.partial(o)", PatchError, "not a plain function"),
        ("def free(original):\n    raise ImportError('gone')", PatchError, "ImportError: gone"),
        ("import nothing_of_the_kind", PatchError, "cannot be imported"),
        ("other = 1", PatchError, "cannot be imported"),
    ],
)
def test_a_bad_replacement_is_refused(world: World, source: str, error: type[PatchError], says: str) -> None:
    world.write(f"{world.ours}/patches.py", source)
    patches = world.patchset(world.entry())
    original = world.load("PKG.core").free
    with pytest.raises(error, match=says) as caught:
        patches.apply(role="red", process="worker")
    assert not isinstance(caught.value, ImportError)
    assert caught.value.patch_id == "core.free"
    assert world.load("PKG.core").free is original


def test_a_replace_function_that_would_not_pickle_is_refused(world: World) -> None:
    source = "def made():\n    def free(x, scale=2): ...\n    return free\nfree = made()\n"
    world.write(f"{world.ours}/patches.py", source)
    patches = world.patchset(world.entry(kind="replace"))
    with pytest.raises(PatchError, match="wouldn't pickle"):
        patches.apply(role="red", process="worker")


# ---- roles and processes -------------------------------------------------------------------------------------------


def test_only_the_role_s_and_the_process_s_entries_are_applied(world: World) -> None:
    patches = world.patchset(
        world.entry(roles=["red"], processes=["worker"]),
        world.entry("PKG.core:Engine.run", roles=["red", "blue"], processes=["api"]),
        world.entry("PKG.core:Engine.make", roles=["blue"], processes=["worker"]),
        world.entry("PKG.core:Engine.name", roles=["red"], processes=[]),
    )
    patches.apply(role="red", process="worker")
    applied = {name for name, state in patches.states().items() if state is State.APPLIED}
    assert applied == {"core.free", "core.engine-name"}
    patches.apply(role="red", process="api")
    applied = {name for name, state in patches.states().items() if state is State.APPLIED}
    assert applied == {"core.free", "core.engine-name", "core.engine-run"}
    with pytest.raises(Conflict, match="another role"):
        patches.apply(role="blue", process="worker")
    patches.undo()
    patches.apply(role="blue", process="worker")


def test_applying_twice_is_applying_once(world: World) -> None:
    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    patches.apply(role="red", process="worker")
    first = core.free
    patches.apply(role="red", process="worker")
    assert core.free is first
    assert core.free(1) == ("ours", 8)
    assert patches.attest()["processes"] == ["worker"]


def test_an_unknown_role_or_process_is_an_error_that_can_be_corrected(world: World) -> None:
    patches = world.patchset(world.entry())
    with pytest.raises(PatchError, match="red"):
        patches.apply(role="rod", process="worker")
    with pytest.raises(PatchError, match="worker"):
        patches.apply(role="red", process="wurker")
    patches.apply(role="red", process="worker")


def test_an_entry_that_names_no_process_is_for_each_kind(world: World) -> None:
    core = world.load("PKG.core")
    patches = world.patchset(world.entry(processes=[]), world.entry("PKG.core:Engine.run", processes=["api"]))
    assert [step.entry.id for step in patches.plan(role="red", process="worker")] == ["core.free"]
    patches.apply(role="red", process="worker")
    assert core.free(1) == ("ours", 8)


def test_a_plan_for_an_unknown_process_is_an_error_too(world: World) -> None:
    with pytest.raises(PatchError, match="no entry of the manifest is for this process"):
        world.patchset(world.entry()).plan(role="red", process="elsewhere")


def test_a_process_attests_what_it_has(world: World) -> None:
    patches = world.patchset(world.entry(), always(world, "PKG.core:Engine.run"))
    patches.apply(role="red", process="worker")
    told = patches.attest()
    assert told == {
        "role": "red",
        "process": "worker",
        "processes": ["worker"],
        "pid": os.getpid(),
        "start_method": "exec",
        "digest": patches.digest,
        "failure": None,
        "states": {"core.free": "applied", "core.engine-run": "applied"},
    }
    assert pickle.loads(pickle.dumps(told)) == told


def test_original_is_there_while_the_entry_is_in_effect(world: World) -> None:
    patches = world.patchset(world.entry("PKG.core:Engine.make"))
    with pytest.raises(NotInEffect):
        patches.original("core.engine-make")
    core = world.load("PKG.core")
    original = core.Engine.make
    patches.apply(role="red", process="worker")
    assert patches.original("core.engine-make") is original
    patches.undo()
    with pytest.raises(NotInEffect):
        patches.original("core.engine-make")


# ---- releases ------------------------------------------------------------------------------------------------------


def test_a_release_without_a_lock_is_an_error_of_arm_and_apply_and_not_of_load(world: World) -> None:
    world.patchset(always(world))
    world.distribution("1.1")
    patches = PatchSet.load(world.ours)
    assert patches.states() == {}
    for call in (patches.arm, lambda: patches.apply(role="red", process="worker"), patches.arm):
        with pytest.raises(OtherVersion, match=r"1\.0 .*1\.1") as caught:
            call()
    assert caught.value.exit_code == 8
    world.load("PKG.core")


def test_the_lock_is_picked_by_the_installed_release(world: World) -> None:
    world.patchset(world.entry())
    world.write(f"{world.package}/_version.py", "__version__ = '1.1'\n")
    world.distribution("1.1+cpu")
    world.core("x + LIMIT", "x + LIMIT + 1")
    patches = world.patchset(world.entry(why="For 1.1."), version="1.1")
    patches.apply(role="red", process="worker")
    assert world.load("PKG.core").free(1) == ("ours", 10)


def test_nothing_happens_where_the_package_is_not_installed(world: World) -> None:
    world.patchset(always(world))
    (world.site / world.package).rename(world.site / "elsewhere")
    importlib.invalidate_caches()
    patches = PatchSet.load(world.ours)
    patches.arm()
    with pytest.raises(OtherVersion, match="not installed"):
        patches.apply(role="red", process="worker")


def test_verify_of_a_set_is_the_command_s_report(world: World) -> None:
    patches = world.patchset(world.entry())
    assert patches.verify().verdict.exit_code == 0
    world.core("* scale\n", "* scale + 1\n")
    assert patches.verify().verdict.exit_code == 4
