"""Modules that hold a target by name get ours, and the original back."""

from __future__ import annotations

import pytest

from afdpatch.registry import NotInEffect
from tests.registry.conftest import World, always

# ---- holders -------------------------------------------------------------------------------------------------------

HOLDER = "from PKG.core import free\nfrom PKG.core import free as alias\ndef use(): return free(1), alias(1)\n"


@pytest.mark.parametrize("when", ["always", "role"])
@pytest.mark.parametrize("first", ["holder", "patch"])
def test_a_holder_gets_ours_whether_imported_before_or_after(world: World, when: str, first: str) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    patches = world.patchset(world.entry(when=when, holders=["PKG.user"]))
    if first == "holder":
        world.load("PKG.user")
    patches.arm()
    if when == "role":
        patches.apply(role="red", process="worker")
    user = world.load("PKG.user")
    assert user.use() == (("ours", 8), ("ours", 8))
    assert user.free is world.load("PKG.core").free


def test_a_holder_imported_during_the_target_s_import_gets_ours(world: World) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    world.core("class Engine:", "from . import user\n\n\nclass Engine:")
    world.patchset(always(world, holders=["PKG.user"])).arm()
    world.load("PKG.core")
    assert world.load("PKG.user").use() == (("ours", 8), ("ours", 8))


def test_a_holder_that_imports_the_target_gets_ours(world: World) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    world.patchset(always(world, holders=["PKG.user"])).arm()
    assert world.load("PKG.user").use() == (("ours", 8), ("ours", 8))


def test_a_later_holder_that_got_the_original_elsewhere_gets_ours(world: World) -> None:
    world.write(f"{world.package}/user.py", "import OURS\nfrom PKG.core import free\nfree = OURS.kept\n")
    core = world.load("PKG.core")
    ours = world.load("OURS")
    ours.kept = core.free
    world.patchset(always(world, holders=["PKG.user"])).arm()
    assert world.load("PKG.user").free is core.free is not ours.kept


def test_a_holder_that_is_not_listed_is_an_error_that_names_it(world: World) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    user = world.load("PKG.user")
    core = world.load("PKG.core")
    original = core.free
    patches = world.patchset(world.entry())
    with pytest.raises(NotInEffect, match=rf"{world.package}\.user"):
        patches.apply(role="red", process="worker")
    assert core.free is user.free is original


@pytest.mark.parametrize("listed", [True, False])
def test_undo_gives_later_importers_the_original(world: World, listed: bool) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    patches = world.patchset(always(world, holders=["PKG.user"] if listed else []))
    patches.arm()
    user = world.load("PKG.user")
    assert user.use() == (("ours", 8), ("ours", 8))
    patches.undo()
    assert user.use() == (8, 8)


def test_undo_gives_holders_the_original_back(world: World) -> None:
    world.write(f"{world.package}/user.py", HOLDER)
    user = world.load("PKG.user")
    original = user.free
    patches = world.patchset(always(world, holders=["PKG.user"]))
    patches.arm()
    assert user.free is not original
    patches.undo()
    assert user.free is user.alias is world.load("PKG.core").free is original


def test_an_import_in_a_function_holds_nothing(world: World) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.declare(world.entry(holders=["PKG.user"]))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/user.py", "def use():\n    from .core import free\n    return free\n")
    assert (world.verify(), world.pin()) == (4, 3)
