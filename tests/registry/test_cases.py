"""The faults that people met with other registries; FAULTS says which test shows that each is none here."""

from __future__ import annotations

import gc
import importlib
import inspect
import pickle
import sys
import threading
from typing import Any

import pytest

from afdpatch.registry import Conflict, NotInEffect, PatchError, State, TargetDrifted, Unpatchable
from tests.registry.conftest import World

FAULTS = {
    "01 a missed anchor is skipped in silence": "test_verify.test_a_change_is_drift",
    "02 one half of a feature is in effect": "test_cases.test_case_02_",
    "03 a second patcher overwrites the first": "test_sets.test_two_sets_on_one_target_without_an_order_are_a_",
    "04 a foreign wrapper beneath ours": "test_cases.test_case_04_",
    "05 an alias taken before the patch": "test_cases.test_case_05_06_",
    "06 ready, and never fires: a route table": "test_cases.test_case_05_06_",
    "07 an alias taken during the target's own import": "test_cases.test_case_07_",
    "08 partials, tables, class attributes, defaults": "test_keepers.test_what_the_target_s_own_module_keeps_",
    "09 subclasses of a replaced class": "test_keepers.test_a_class_s_subclasses_are_named_",
    "11 importing a plug-in patches plain users": "test_cases.test_case_11_",
    "12 the order of imports is a gate": "test_cases.test_case_12_",
    "13 wrapped twice": "test_cases.test_case_13_14_",
    "14 recursion after patching again": "test_transaction.test_a_thousand_rounds_do_not_grow",
    "15 imported already": "test_cases.test_case_15_",
    "16 spawn and forkserver lose patches": "test_attest.test_forked_spawned_and_forkserved_processes_attest",
    "17 a process doesn't load plug-ins": "test_attest.test_a_process_that_is_missing_or_differs_is_named",
    "19 pickling": "test_cases.test_case_19_",
    "20 the signature": "test_cases.test_case_20_",
    "21 isinstance, abstract classes, typing, super": "test_cases.test_case_21_",
    "26 loader and spec are damaged": "test_cases.test_case_26_",
    "27 reload and second import": "test_reload.test_every_target_is_patched_again",
    "28 static and class methods": "test_cases.test_case_28_",
    "30 what is made of C": "test_cases.test_case_30_",
    "32 coroutines and generators": "test_kinds.test_a_replacement_of_another_call_kind_is_refused",
    "33 abstract methods": "test_cases.test_case_33_",
    "34 fields of dataclasses and models": "test_keepers.test_what_cannot_be_patched_is_refused_by_its_source",
    "36 instances that bound the method at init": "test_cases.test_case_36_",
    "37 torch.compile ignores proxies": "test_compile.test_a_wrapt_proxy_would_be_found_out",
    "38 callable objects": "test_cases.test_case_37_38_",
    "39 a stale compile cache": "test_compile.test_the_key_has_the_digest_and_the_user_s_values_",
    "40 the signature drifts": "test_cases.test_case_40_",
    "41 the module is gone": "test_census.test_verify_proposes_where_a_vanished_target_went",
    "42 a patch outlives its reason": "test_ci.test_a_patch_that_is_not_needed_any_more_fails_ci",
    "43 warnings with exit code 0": "test_verify.test_the_gravest_verdict_counts",
    "44 dev, +cpu and the distribution's name": "test_verify.test_a_local_part_is_the_same_version",
    "47 moved to a base class": "test_source.test_an_inherited_method_is_found_through_plain_bases",
    "50 absent or incompatible, told apart": "test_verify.test_a_holder_that_let_go_has_drifted_and_a_lost_one_is_",
    "51 unexplained": "test_reports.test_text_",
}
"""Fault, by its number in the survey: the test, or how its name begins. 46, source text, is not patched here."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_test(fault: str) -> None:
    module, _, name = FAULTS[fault].partition(".")
    tests = vars(importlib.import_module(f"tests.registry.{module}"))
    assert [test for test in tests if test.startswith(name)], FAULTS[fault]


@pytest.mark.parametrize("made", ["from math import sqrt as free", "free = len", "free = dict.get"])
def test_case_30_what_is_made_of_c_is_refused_before_anything_is_changed(world: World, made: str) -> None:
    world.write(f"{world.package}/c.py", f"{made}\n")
    world.declare(world.entry("PKG.c:free"))
    assert world.pin() in (2, 3)
    world.write(
        f"{world.package}/c.py", f"def deco(f):\n    {made}\n    return free\n@deco\ndef free(x, scale=2): ...\n"
    )
    patches = world.patchset(world.entry("PKG.c:free"))
    with pytest.raises(Unpatchable, match="made of C"):
        apply(patches)


def apply(patches: Any) -> None:
    patches.apply(role="red", process="worker")


def test_case_02_if_one_half_of_a_feature_fails_the_other_is_not_in_effect(world: World) -> None:
    core = world.load("PKG.core")
    before = core.free
    patches = world.patchset(world.entry(), world.entry("PKG.core:Engine.run", replacement="OURS.patches:failing"))
    with pytest.raises(PatchError):
        apply(patches)
    assert core.free is before


def test_case_04_a_foreign_wrapper_beneath_ours_is_named(world: World) -> None:
    import functools

    core = world.load("PKG.core")
    original = core.Engine.run

    @functools.wraps(original)
    def closure(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    core.Engine.run = closure
    with pytest.raises(Conflict, match=f"already changed by {__name__}"):
        apply(world.patchset(world.entry("PKG.core:Engine.run")))


def test_case_05_06_a_call_site_that_took_the_name_before_is_rebound_or_named(world: World) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\nROUTES = {}\ndef g(): return free(1)\n")
    user = world.load("PKG.user")
    listed = world.patchset(world.entry(holders=["PKG.user"]))
    apply(listed)
    assert user.g() == ("ours", 8)
    listed.undo()
    with pytest.raises(NotInEffect, match=rf"{world.package}\.user\.free"):
        apply(world.patchset(world.entry(why="Another.")))
    user.ROUTES["/"] = user.free
    with pytest.raises(NotInEffect, match="ROUTES"):
        apply(world.patchset(world.entry(holders=["PKG.user"])))


def test_case_07_a_name_taken_during_the_target_s_own_import_is_rebound(world: World) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.core("class Engine:", "from . import user\n\n\nclass Engine:")
    world.patchset(world.entry(when="always", holders=["PKG.user"])).arm()
    core = world.load("PKG.core")
    assert world.load("PKG.user").free is core.free
    assert core.free(1) == ("ours", 8)


def test_case_11_importing_a_plug_in_changes_nothing_until_it_is_armed(world: World) -> None:
    patches = world.patchset(world.entry(when="always"))
    world.load("OURS.patches")
    assert world.load("PKG.core").free(1) == 8
    assert patches.states() == {}


def test_case_12_the_order_of_imports_does_not_matter_and_pending_is_told(world: World) -> None:
    patches = world.patchset(world.entry(when="always"))
    patches.arm()
    assert patches.states() == {"core.free": State.PENDING}
    assert world.load("PKG.core").free(1) == ("ours", 8)


def test_case_13_14_applying_again_neither_wraps_twice_nor_recurses(world: World) -> None:
    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    original = core.free
    for _ in range(50):
        apply(patches)
        apply(patches)
        importlib.reload(world.load("OURS.patches"))
        assert core.free(1) == ("ours", 8)
        assert core.free.__wrapped__ is original
        patches.undo()
    assert core.free is original


def test_case_15_what_is_imported_already_is_patched_where_it_is(world: World) -> None:
    world.write(f"{world.package}/user.py", "from . import core\ndef g(): return core.free(1)\n")
    user = world.load("PKG.user")
    world.patchset(world.entry(when="always")).arm()
    assert user.g() == ("ours", 8)


def test_case_19_what_is_patched_pickles_by_its_name(world: World) -> None:
    patches = world.patchset(world.entry(), world.entry("PKG.core:Engine.run"), world.entry("PKG.core:Engine.name"))
    apply(patches)
    core = world.load("PKG.core")
    for item in (core.free, core.Engine.run, core.Engine.name, core.Engine().run):
        again = pickle.loads(pickle.dumps(item))
        assert getattr(again, "__func__", again) is getattr(item, "__func__", item)


def test_case_20_the_signature_is_the_original_s(world: World) -> None:
    core = world.load("PKG.core")
    before = inspect.signature(core.Engine.run), inspect.getfullargspec(core.free), core.free.__defaults__
    apply(world.patchset(world.entry(), world.entry("PKG.core:Engine.run")))
    assert (inspect.signature(core.Engine.run), inspect.getfullargspec(core.free), core.free.__defaults__) == before
    assert inspect.getcallargs(core.Engine().run, 1)["x"] == 1


def test_case_21_classes_and_results_are_no_proxies(world: World) -> None:
    core = world.load("PKG.core")
    engine = core.Engine
    apply(world.patchset(world.entry("PKG.core:Engine.run")))
    sub = type("Sub", (engine,), {})
    assert core.Engine is engine and type(core.Engine) is type
    assert isinstance(sub(), engine) and issubclass(sub, core.Engine) and super(sub, sub()).run(1)[0] == "ours"


def test_case_26_loader_spec_and_source_of_a_hooked_module_are_untouched(world: World) -> None:
    world.patchset(world.entry(when="always")).arm()
    core = world.load("PKG.core")
    assert core.__spec__ is not None and core.__spec__.loader is core.__loader__
    assert type(core.__loader__).__module__.startswith("_frozen_importlib")
    assert "def helper" in core.__loader__.get_source(core.__name__)  # type: ignore[union-attr]


def test_case_27_a_module_that_is_reloaded_or_imported_anew_is_patched_again(world: World) -> None:
    patches = world.patchset(world.entry())
    apply(patches)
    importlib.reload(world.load("PKG.core"))
    assert world.load("PKG.core").free(1) == ("ours", 8)
    del sys.modules[f"{world.package}.core"]
    assert world.load("PKG.core").free(1) == ("ours", 8)
    assert patches.states() == {"core.free": State.APPLIED}
    patches.require()


def test_case_28_static_and_class_methods_stay_so_on_class_instance_subclass_and_super(world: World) -> None:
    core = world.load("PKG.core")
    apply(world.patchset(world.entry("PKG.core:Engine.make"), world.entry("PKG.core:Engine.name")))
    sub = type("Sub", (core.Engine,), {})
    for owner in (core.Engine, core.Engine(), sub, sub(), super(sub, sub)):
        assert owner.make(1) == ("ours", 11)
        assert owner.name()[1] in ("Engine", "Sub")


def test_case_32_a_wrapper_of_another_call_kind_is_refused(world: World) -> None:
    world.write(f"{world.ours}/aio.py", "def free(original):\n    async def free(x, scale=2): ...\n    return free\n")
    with pytest.raises(TargetDrifted, match="another kind"):
        apply(world.patchset(world.entry(replacement="OURS.aio:free")))


def test_case_33_an_abstract_method_stays_what_the_class_is_checked_for(world: World) -> None:
    source = "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def free(self): ...\n"
    world.write(f"{world.package}/abstract.py", source)
    world.write(f"{world.ours}/abstract.py", "def free(original):\n    def free(self): return 1\n    return free\n")
    module = world.load("PKG.abstract")
    before = module.A.__abstractmethods__
    apply(world.patchset(world.entry("PKG.abstract:A.free", replacement="OURS.abstract:free")))
    assert module.A.__abstractmethods__ == before
    assert module.A.free.__isabstractmethod__
    with pytest.raises(TypeError):
        module.A()


def test_case_36_an_instance_that_bound_the_method_at_init_is_named(world: World) -> None:
    world.core(
        "    @staticmethod", "    def __init__(self):\n        self._forward_method = self.run\n\n    @staticmethod"
    )
    patches = world.patchset(world.entry("PKG.core:Engine.run"))
    core = world.load("PKG.core")
    early = core.Engine()
    with pytest.raises(NotInEffect, match=rf"bound method, an attribute of an object of {world.package}\.core\.Engine"):
        apply(patches)
    patches.undo()
    del early
    gc.collect()  # the instance and its bound method hold each other
    apply(patches)
    assert core.Engine()._forward_method(1)[0] == "ours"


@pytest.mark.parametrize(
    "made", ["functools.partial(original)", "wrapt.FunctionWrapper(original, print)", "Callable()"]
)
def test_case_37_38_only_plain_functions_are_installed(world: World, made: str) -> None:
    source = "import functools, wrapt\nclass Callable:\n    def __call__(self, x, scale=2): ...\n"
    world.write(f"{world.ours}/proxy.py", f"{source}def free(original):\n    return {made}\n")
    with pytest.raises(PatchError, match="not a plain function"):
        apply(world.patchset(world.entry(replacement="OURS.proxy:free")))


def test_case_39_another_version_of_a_set_has_another_digest(world: World) -> None:
    digests = {world.patchset(world.entry(why=why)).digest for why in ("One.", "Two.")}
    assert len(digests) == 2


def test_case_40_a_replacement_that_could_not_be_called_like_the_original_is_refused(world: World) -> None:
    world.write(f"{world.ours}/drift.py", "def free(original):\n    def free(x): ...\n    return free\n")
    with pytest.raises(TargetDrifted, match="scale"):
        apply(world.patchset(world.entry(replacement="OURS.drift:free")))


# ---- failure -------------------------------------------------------------------------------------------------------

OPTIONAL = """
ERRORS = []
def load():
    try:
        from PKG import core
        return core
    except {kind} as error:
        ERRORS.append(error)
        return None
"""


def test_a_failed_hook_is_not_taken_for_a_missing_optional_dependency(world: World) -> None:
    world.write(f"{world.package}/optional.py", OPTIONAL.format(kind="(ImportError, AttributeError, OSError)"))
    world.patchset(world.entry(when="always", replacement="OURS.patches:failing")).arm()
    for _ in range(3):
        with pytest.raises(PatchError, match="by design"):
            world.load("PKG.optional").load()


def test_where_every_exception_is_swallowed_the_set_stays_poisoned(world: World) -> None:
    world.write(f"{world.package}/optional.py", OPTIONAL.format(kind="Exception"))
    failing = world.entry(when="always", replacement="OURS.patches:failing")
    patches = world.patchset(failing, world.entry("PKG.core:Engine.run"))
    patches.arm()
    optional = world.load("PKG.optional")
    assert [optional.load() for _ in range(3)] == [None] * 3
    assert all(error is patches.failure for error in optional.ERRORS)
    for call in (patches.arm, patches.require, lambda: apply(patches)):
        with pytest.raises(PatchError, match="by design"):
            call()
    assert f"{world.package}.core" not in sys.modules


def python_s_own(error: Exception) -> bool:
    """Whether Python gave up an import because two threads import a circle."""
    half = isinstance(error, ImportError) and str(error).startswith("cannot import name")
    return half or type(error).__name__ == "_DeadlockError"


def test_circular_imports_in_several_threads_neither_deadlock_nor_skip_a_hook(world: World) -> None:
    world.write(f"{world.package}/a.py", "from . import b\ndef free(x, scale=2): return b\n")
    world.write(f"{world.package}/b.py", "from . import a\ndef free(x, scale=2): return a\n")
    for _ in range(5):
        entries = [world.entry(f"PKG.{name}:free", id=f"{name}.free", when="always") for name in "ab"]
        patches = world.patchset(*entries, world.entry("PKG.core:Engine.run", id="run"))
        barrier, errors = threading.Barrier(5), []

        def run(action: Any, barrier: Any = barrier, errors: Any = errors) -> None:
            barrier.wait()
            try:
                action()
            except Exception as caught:
                errors.append(caught)

        actions = [patches.arm, lambda: world.load("PKG.a"), lambda: world.load("PKG.b"), patches.arm]
        actions.append(lambda patches=patches: apply(patches))  # type: ignore[misc]
        threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        # Armed from within an import that is under way is an error by name; a hook is never skipped in silence. Python
        # itself may end an import of a circle by two threads (without any patch in one of seven such tries).
        ours = [error for error in errors if not python_s_own(error)]
        assert all(isinstance(error, PatchError) for error in ours), errors
        states = patches.states()
        if ours:
            assert patches.failure is not None
        elif not errors:
            assert set(states.values()) == {State.APPLIED}
        else:
            there = [name for name in "ab" if f"{world.package}.{name}" in sys.modules]
            assert all(states[f"{name}.free"] is State.APPLIED for name in there), (states, errors)
        patches.undo()
        for name in [name for name in sys.modules if name.startswith(f"{world.package}.")]:
            del sys.modules[name]
