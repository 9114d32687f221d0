"""Nothing is left half done: shown by the identity of what stands in every slot."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from afdpatch.registry import PatchError, State, TargetAbsent, TargetDrifted
from tests.registry.conftest import World


def slots(world: World) -> dict[str, Any]:
    core = world.load("PKG.core")
    found = {"free": vars(core).get("free")}
    return found | {name: vars(core.Engine).get(name) for name in ("run", "make", "name")}


def all_entries(world: World, **last: Any) -> list[dict[str, Any]]:
    entries = [world.entry(), *(world.entry(f"PKG.core:Engine.{name}") for name in ("run", "make", "name"))]
    entries[-1] |= last
    return entries


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] is other[name] for name in one)


def test_a_factory_that_fails_leaves_every_slot(world: World) -> None:
    before = slots(world)
    patches = world.patchset(*all_entries(world, replacement="OURS.patches:failing"))
    with pytest.raises(PatchError, match=r"core\.engine-name.*ZeroDivisionError: by design"):
        patches.apply(role="red", process="worker")
    assert same(slots(world), before)
    assert set(patches.states().values()) == {State.IDLE}


def test_a_slot_that_cannot_be_filled_restores_those_before_it(world: World) -> None:
    source = """
    class Meta(type):
        def __setattr__(cls, name, value):
            raise RuntimeError("no")
    class Last(metaclass=Meta):
        def run(self, x, *, twice=False): ...
    """
    world.write(f"{world.package}/strict.py", source)
    world.write(f"{world.package}/user.py", "from .core import free\n")
    before, user = slots(world), world.load("PKG.user")
    entries = [
        world.entry(kind="install", replacement="OURS.patches:install", id="core.install"),
        world.entry(holders=["PKG.user"]),
        world.entry("PKG.core:Engine.make"),
        world.entry("PKG.strict:Last.run"),
    ]
    patches = world.patchset(*entries)
    run = vars(world.load("PKG.strict").Last)["run"]
    with pytest.raises(PatchError, match="RuntimeError: no"):
        patches.apply(role="red", process="worker")
    assert same(slots(world), before)
    assert user.free is before["free"]
    assert vars(world.load("PKG.strict").Last)["run"] is run
    assert world.load("OURS.patches").log == ["installed", "removed"]


@pytest.mark.parametrize("how", ["undo", "failure"])
def test_a_name_that_had_a_value_like_ours_before_keeps_it(world: World, how: str) -> None:
    world.core("LIMIT = 3", "LIMIT = 3\nFLAG = False")
    world.write(f"{world.package}/user.py", "from .core import FLAG\nFLAG = True\n")
    world.write(f"{world.package}/other.py", "from .core import FLAG\n")
    world.write(f"{world.ours}/values.py", "FLAG = True\n")
    flag = world.entry(
        "PKG.core:FLAG", kind="replace", replacement="OURS.values:FLAG", holders=["PKG.user", "PKG.other"]
    )
    last = world.entry(replacement="OURS.patches:late")
    late = "def late(original):\n    def free(x, scale=2): ...\n    return free\n"
    world.write(f"{world.ours}/patches.py", late)
    patches = world.patchset(flag, last)
    user, other, core = (world.load(f"PKG.{name}") for name in ("user", "other", "core"))
    if how == "failure":
        core.__class__ = type("Strict", (type(core),), {"__setattr__": refuse_free})
        with pytest.raises(PatchError, match="RuntimeError: no"):
            patches.apply(role="red", process="worker")
    else:
        patches.apply(role="red", process="worker")
        assert (core.FLAG, other.FLAG, user.FLAG) == (True, True, True)
        importlib.reload(core)
        assert (core.FLAG, other.FLAG, user.FLAG) == (True, True, True)
        patches.undo()
    assert (core.FLAG, other.FLAG, user.FLAG) == (False, False, True)


def refuse_free(module: Any, name: str, value: object) -> None:
    if name == "free":
        raise RuntimeError("no")
    vars(module)[name] = value


def test_a_created_slot_is_deleted_by_the_rollback(world: World) -> None:
    world.write(f"{world.package}/sub.py", "from .core import Engine\nclass Sub(Engine): ...\n")
    world.write(
        f"{world.package}/strict.py",
        "class M(type):\n    __setattr__ = None\nclass S(metaclass=M):\n    def run(self, x, *, twice=False): ...",
    )
    patches = world.patchset(world.entry("PKG.sub:Sub.run"), world.entry("PKG.strict:S.run", id="core.last"))
    with pytest.raises(PatchError):
        patches.apply(role="red", process="worker")
    assert "run" not in vars(world.load("PKG.sub").Sub)


def test_an_assignment_that_does_not_take_is_found_by_reading_back(world: World) -> None:
    source = """
    class Deaf(type):
        def __setattr__(cls, name, value):
            pass
    class Last(metaclass=Deaf):
        def run(self, x, *, twice=False): ...
    """
    world.write(f"{world.package}/deaf.py", source)
    before = slots(world)
    patches = world.patchset(world.entry(), world.entry("PKG.deaf:Last.run", id="deaf.run"))
    with pytest.raises(PatchError, match=r"deaf\.run.*isn't there") as caught:
        patches.apply(role="red", process="worker")
    assert caught.value.exit_code == 7
    assert same(slots(world), before)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("* scale\n", "* scale + 1\n", TargetDrifted),
        ("x + LIMIT", "x - LIMIT", TargetDrifted),
        ("def helper", "def hilper", TargetAbsent),
    ],
)
def test_drift_is_found_before_anything_is_imported(world: World, old: str, new: str, error: type[PatchError]) -> None:
    entries = all_entries(world)
    entries[0] |= {"relies": ["PKG.core:helper"]}
    patches = world.patchset(*entries)
    world.core(old, new)
    with pytest.raises(error, match=r"core\.py:\d+"):
        patches.apply(role="red", process="worker")
    assert f"{world.package}.core" not in sys.modules
    assert f"{world.ours}.patches" not in sys.modules


def test_comments_may_change(world: World) -> None:
    patches = world.patchset(*all_entries(world))
    world.core("# a comment", "# another")
    patches.apply(role="red", process="worker")
    assert set(patches.states().values()) == {State.APPLIED}


def test_a_target_that_the_module_takes_away_is_absent(world: World) -> None:
    world.write(
        f"{world.package}/core.py", (world.site / world.package / "core.py").read_text() + "\n\nglobals().pop('free')\n"
    )
    patches = world.patchset(*all_entries(world))
    with pytest.raises(TargetAbsent, match=r"core\.free"):
        patches.apply(role="red", process="worker")


def test_a_target_module_that_fails_to_import_is_told(world: World) -> None:
    world.core("LIMIT = 3", "import nothing_of_the_kind\n\nLIMIT = 3")
    patches = world.patchset(*all_entries(world))
    with pytest.raises(TargetAbsent, match="nothing_of_the_kind"):
        patches.apply(role="red", process="worker")


def test_a_failure_is_sticky_until_undo(world: World) -> None:
    patches = world.patchset(*all_entries(world, replacement="OURS.patches:failing"))
    errors = []
    for _ in range(3):
        with pytest.raises(PatchError) as caught:
            patches.apply(role="red", process="worker")
        errors.append(caught.value)
        world.load("OURS.patches").failing = world.load("OURS.patches").name
    assert errors[0] is errors[1] is errors[2] is patches.failure
    assert patches.attest()["failure"] == str(errors[0])
    with pytest.raises(PatchError):
        patches.require()
    patches.undo()
    assert patches.failure is None
    patches.apply(role="red", process="worker")
    assert set(patches.states().values()) == {State.APPLIED}


def test_a_failed_hook_fails_the_import_each_time_and_apply_too(world: World) -> None:
    entries = [world.entry(when="always", replacement="OURS.patches:failing"), world.entry("PKG.core:Engine.run")]
    patches = world.patchset(*entries)
    patches.arm()
    errors = []
    for action in (
        lambda: world.load("PKG.core"),
        lambda: world.load("PKG.core"),
        patches.arm,
        lambda: patches.apply(role="red", process="worker"),
    ):
        with pytest.raises(PatchError, match="by design") as caught:
            action()
        errors.append(caught.value)
    assert all(error is errors[0] for error in errors)
    assert not isinstance(errors[0], ImportError)
    assert f"{world.package}.core" not in sys.modules
    patches.undo()
    assert world.load("PKG.core").free(1) == 8


def test_after_a_failed_hook_other_targets_are_refused_too(world: World) -> None:
    world.write(f"{world.package}/more.py", "def free(x, scale=2): return 1")
    failing = world.entry(when="always", replacement="OURS.patches:failing")
    patches = world.patchset(failing, world.entry("PKG.more:free", id="more.free", when="always"))
    patches.arm()
    for module in ("PKG.core", "PKG.more", "PKG.more"):
        with pytest.raises(PatchError, match="by design"):
            world.load(module)


def test_a_drifted_source_fails_the_import_of_an_armed_target(world: World) -> None:
    patches = world.patchset(world.entry(when="always"))
    world.core("* scale\n", "* scale + 1\n")
    patches.arm()
    for _ in range(2):
        with pytest.raises(TargetDrifted):
            world.load("PKG.core")


def test_one_module_s_armed_entries_are_all_in_effect_or_none(world: World) -> None:
    entries = [world.entry(when="always"), world.entry("PKG.core:Engine.run", when="always")]
    entries[1]["replacement"] = "OURS.patches:failing"
    core = world.load("PKG.core")
    original = core.free
    patches = world.patchset(*entries)
    with pytest.raises(PatchError):
        patches.arm()
    assert core.free is original


def test_a_failed_apply_leaves_armed_entries_so_that_the_process_stays_closed(world: World) -> None:
    armed = world.entry("PKG.core:Engine.run", when="always")
    patches = world.patchset(armed, world.entry(replacement="OURS.patches:failing"))
    core = world.load("PKG.core")
    patches.arm()
    with pytest.raises(PatchError):
        patches.apply(role="red", process="worker")
    assert core.Engine().run(1)[0] == "ours"
    assert core.free(1) == 8


def test_an_install_that_gives_no_undo_is_refused(world: World) -> None:
    world.write(f"{world.ours}/patches.py", "def install(): return None")
    patches = world.patchset(world.entry(kind="install", replacement="OURS.patches:install"))
    with pytest.raises(PatchError, match="must return its undo"):
        patches.apply(role="red", process="worker")


def test_an_undo_that_fails_does_not_keep_the_others_from_being_undone(world: World) -> None:
    source = "def install():\n    def undo():\n        raise RuntimeError('stuck')\n    return undo\n"
    world.write(f"{world.ours}/stuck.py", source)
    before = slots(world)
    entries = all_entries(world)
    stuck = world.entry(kind="install", replacement="OURS.stuck:install", id="core.stuck")
    patches = world.patchset(*entries[:2], stuck, *entries[2:])
    patches.apply(role="red", process="worker")
    with pytest.raises(RuntimeError, match="stuck"):
        patches.undo()
    assert same(slots(world), before)


def test_what_others_put_over_ours_is_removed_with_a_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    original = core.free
    patches.apply(role="red", process="worker")
    core.free = print
    patches.undo()
    assert core.free is original
    assert "put over our patch" in caplog.text


def test_a_thousand_rounds_do_not_grow(world: World) -> None:
    patches = world.patchset(world.entry("PKG.core:Engine.run", when="always"))
    core = world.load("PKG.core")
    original = core.Engine.run
    for _ in range(1000 // 20):
        patches.arm()
        assert core.Engine.run.__wrapped__ is original
        patches.undo()
        assert core.Engine.run is original


def test_arming_from_within_the_target_s_import_is_refused(world: World) -> None:
    world.core("LIMIT = 3", "import OURS\nOURS.patches_of_ours.arm()\nLIMIT = 3".replace("OURS", world.ours))
    patches = world.patchset(world.entry(when="always"))
    world.load("OURS").patches_of_ours = patches
    with pytest.raises(PatchError, match="half imported"):
        world.load("PKG.core")
