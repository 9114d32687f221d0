"""Several sets in one process: order, conflicts, stacking; a set's dry run, `with` block, and who puts what over it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from afdpatch.registry import Conflict, ManifestError, NotInEffect, PatchError, PatchSet, State
from tests.registry.conftest import Make, World


def apply(patches: PatchSet) -> None:
    patches.apply(role="red", process="worker")


# ---- two sets on one target ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("armed", [True, False], ids=["armed", "applied"])
def test_two_sets_on_one_target_without_an_order_are_a_conflict_that_names_both(
    world: World, make: Make, armed: bool
) -> None:
    when = "always" if armed else "role"
    one, two = make("one", world.entry(when=when)), make("two", world.entry(when=when, id="theirs.free"))
    original = world.load("PKG.core").free
    (one.arm if armed else lambda: apply(one))()
    first = world.load("PKG.core").free
    with pytest.raises(Conflict, match=r"theirs\.free.*one/core\.free") as caught:
        (two.arm if armed else lambda: apply(two))()
    assert caught.value.exit_code == 5
    assert world.load("PKG.core").free is first
    assert one.states() == {"core.free": State.APPLIED}
    two.undo()
    one.undo()
    assert world.load("PKG.core").free is original


@pytest.mark.parametrize("target", ["free", "Engine.run", "Engine.make", "Engine.name"])
def test_a_declared_order_stacks_two_sets(world: World, make: Make, target: str) -> None:
    below = world.entry(f"PKG.core:{target}", id="below")
    above = world.entry(f"PKG.core:{target}", id="above", after=["one/below"])
    one, two = make("one", below), make("two", above)
    core = world.load("PKG.core")
    calls: dict[str, Callable[[], Any]] = {
        "free": lambda: core.free(1),
        "Engine.run": lambda: core.Engine().run(1),
        "Engine.make": lambda: core.Engine.make(1),
        "Engine.name": lambda: core.Engine.name(),
    }
    call = calls[target]
    plain = call()
    apply(one)
    apply(two)
    assert call() == ("ours", ("ours", plain))
    one.require()
    two.require()
    assert (one.states(), two.states()) == ({"below": State.APPLIED}, {"above": State.APPLIED})
    with pytest.raises(Conflict, match=r"two/above is in effect over it.*undo the set 'two' first"):
        one.undo()
    assert call() == ("ours", ("ours", plain))
    two.undo()
    assert call() == ("ours", plain)
    one.undo()
    assert call() == plain


def test_a_replacement_below_is_stacked_on_too(world: World, make: Make) -> None:
    one = make("one", world.entry(kind="replace", replacement="OURS.patches:replaced_free"))
    two = make("two", world.entry(id="above", after=["one/core.free"]))
    core = world.load("PKG.core")
    apply(one)
    apply(two)
    assert core.free(1) == ("ours", ("replaced", 1, 2))


def test_the_one_that_comes_after_may_not_come_first(world: World, make: Make) -> None:
    one, two = make("one", world.entry(id="below")), make("two", world.entry(id="above", after=["one/below"]))
    apply(two)
    with pytest.raises(Conflict, match="two/above already"):
        apply(one)


def test_stacked_holders_are_given_back_in_turn(world: World, make: Make) -> None:
    world.write(f"{world.package}/user.py", "from .core import free as mine\n")
    one = make("one", world.entry(id="below", holders=["PKG.user"]))
    two = make("two", world.entry(id="above", after=["one/below"], holders=["PKG.user"]))
    user = world.load("PKG.user")
    original = user.mine
    apply(one)
    first = user.mine
    apply(two)
    assert user.mine(1) == ("ours", ("ours", 8))
    two.undo()
    assert user.mine is first
    one.undo()
    assert user.mine is original


@pytest.mark.parametrize("declared_by", ["one", "two"])
def test_declared_conflicts_are_refused_whoever_declares_them(world: World, make: Make, declared_by: str) -> None:
    first, second = world.entry(), world.entry("PKG.core:Engine.run", id="theirs")
    if declared_by == "one":
        first["conflicts"] = ["two/theirs"]
    else:
        second["conflicts"] = ["one/core.free"]
    one, two = make("one", first), make("two", second)
    run = world.load("PKG.core").Engine.run
    apply(one)
    with pytest.raises(Conflict, match=r"theirs.*one/core\.free"):
        apply(two)
    assert world.load("PKG.core").Engine.run is run
    two.undo()
    one.undo()
    apply(two)


ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "after what comes later": ({"after": ["second"]}, {}, "comes before 'second'"),
    "after itself": ({"after": ["first"]}, {}, "another entry"),
    "after nobody": ({"after": ["third"]}, {}, "another entry"),
    "by the manifest's own name": ({"after": ["afd/third"]}, {}, "another entry"),
    "a bad name": ({"after": ["Not An Id"]}, {}, "manifest/id"),
    "conflict that cannot be avoided": ({"conflicts": ["second"]}, {}, "processes that use both"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_and_conflicts_within_a_manifest_are_checked_when_it_is_read(world: World, name: str) -> None:
    from afdpatch.registry import Manifest

    one, two, says = ORDERS[name]
    entries = [world.entry(id="first") | one, world.entry("PKG.core:Engine.run", id="second") | two]
    with pytest.raises(ManifestError, match=says):
        Manifest.parse(world.data(*entries), source="m.yaml")


def test_entries_that_never_meet_may_conflict_and_order_is_frozen_only_where_it_is_given(world: World) -> None:
    from afdpatch.registry import Manifest

    first = world.entry(id="first")
    second = world.entry("PKG.core:Engine.run", id="second", roles=["blue"], conflicts=["first"], after=["first"])
    frozen = Manifest.parse(world.data(first, second), source="m.yaml").as_dict()["patches"]
    assert "after" not in frozen[0] and "conflicts" not in frozen[0]
    assert (frozen[1]["after"], frozen[1]["conflicts"]) == (["first"], ["first"])


# ---- above ours ----------------------------------------------------------------------------------------------------


def test_who_puts_something_over_ours_is_named(world: World) -> None:
    import functools

    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    apply(patches)

    @functools.wraps(core.free)
    def over(*args: Any) -> Any: ...

    core.free = over
    assert patches.states() == {"core.free": State.LOST}
    with pytest.raises(NotInEffect, match=rf"core\.free.*over \({__file__}:\d+\), of {__name__}"):
        patches.require()


# ---- with, and dry -------------------------------------------------------------------------------------------------


def test_a_set_is_in_effect_for_a_with_block(world: World) -> None:
    patches = world.patchset(world.entry())
    core = world.load("PKG.core")
    original = core.free
    with pytest.raises(ZeroDivisionError), patches.applied(role="red", process="worker") as same:
        assert same is patches
        assert core.free(1) == ("ours", 8)
        raise ZeroDivisionError
    assert core.free is original


def test_a_plan_says_what_would_be_done_and_does_nothing(world: World) -> None:
    world.write(f"{world.package}/user.py", "from .core import free as mine\n")
    world.write(f"{world.package}/more.py", "def more(x): ...\n")
    patches = world.patchset(
        world.entry(holders=["PKG.user"]),
        world.entry("PKG.core:Engine.run", when="always"),
        world.entry("PKG.more:more", replacement="OURS.patches:make"),
        world.entry("PKG.core:Engine.make", kind="official"),
        world.entry(kind="install", replacement="OURS.patches:install", id="inst"),
    )
    assert [step.action for step in patches.plan(role="red", process="worker")] == [
        *("import", "wait", "import", "check", "install")
    ]
    assert not [name for name in sys.modules if name.startswith(world.package)]
    user, core = world.load("PKG.user"), world.load("PKG.core")
    before = dict(vars(core)), dict(vars(core.Engine))
    steps = patches.plan(role="red", process="worker")
    assert [step.action for step in steps] == ["wrap", "wrap", "import", "check", "install"]
    assert steps[0].rebinds == (f"{world.package}.core.free", f"{world.package}.user.mine")
    assert [step.action for step in patches.plan()] == ["wrap"]
    assert (dict(vars(core)), dict(vars(core.Engine))) == before
    assert f"{world.ours}.patches" not in sys.modules
    assert set(patches.states().values()) == {State.IDLE}
    assert not any(step.error for step in steps)
    assert "user.mine" in str(steps[0])
    apply(patches)
    assert user.mine(1) == ("ours", 8)
    assert {step.action for step in patches.plan(role="red", process="worker")} == {"none"}


def test_a_plan_tells_what_would_fail(world: World) -> None:
    patches = world.patchset(world.entry(), world.entry("PKG.core:Engine.run"))
    world.load("PKG.core").free = print
    world.core("return self.make(x) * (2", "return self.make(x) * (3")
    steps = patches.plan(role="red", process="worker")
    assert [type(step.error).__name__ for step in steps] == ["TargetDrifted", "TargetDrifted"] or [
        type(step.error).__name__ for step in steps
    ] == ["Conflict", "TargetDrifted"]
    assert "would fail" in str(steps[1])
    with pytest.raises(PatchError):
        apply(patches)
