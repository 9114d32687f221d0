"""Any sequence of arming, importing, applying, failing and undoing ends with the originals or with the whole set."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afdpatch.registry import PatchError, PatchSet
from tests.registry.conftest import World

SWITCHED = """
broken = set()

def check(name):
    if name in broken:
        raise RuntimeError(name)

def make_free(original):
    check("always-core")
    return lambda x, scale=2: ("ours", original(x, scale))

def make_other(original):
    check("always-other")
    return lambda x: ("ours", original(x))

def make_run(original):
    return lambda self, x, *, twice=False: ("ours", original(self, x, twice=twice))

def make_static(original):
    check("role")
    return lambda x: ("ours", original(x))
"""

OPERATIONS = [
    "arm",
    "apply",
    "undo",
    "import core",
    "import other",
    "import user",
    *(f"{verb} {what}" for verb in ("break", "mend") for what in ("always-core", "always-other", "role")),
]

ALWAYS_CORE = (("core", "free"), ("user", "free"))
ALWAYS_OTHER = (("other", "other"),)
ROLE = (("core", "Engine", "run"), ("other", "Class", "make"))


class Slots:
    """Sees, for each slot, whether the original stands in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.first: dict[int, dict[tuple[str, ...], Any]] = {}

    def originals(self, places: tuple[tuple[str, ...], ...]) -> list[bool]:
        found = []
        for place in places:
            owner: Any = sys.modules.get(f"{self.world.package}.{place[0]}")
            if owner is None:
                continue
            for name in place[1:-1]:
                owner = vars(owner)[name]
            value = vars(owner)[place[-1]]
            function = value.__func__ if isinstance(value, staticmethod) else value
            found.append(function.__code__.co_filename.startswith(str(self.world.site / self.world.package)))
        return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=14))
def test_any_sequence_ends_with_the_originals_or_the_whole_set(world: World, operations: list[str]) -> None:
    if not world.manifest.exists():
        world.write(f"{world.ours}/switched.py", SWITCHED)
        world.write(f"{world.package}/user.py", "from .core import free\n")
        other = "def other(x): return x\nclass Class:\n    @staticmethod\n    def make(x): return x\n"
        world.write(f"{world.package}/other.py", other)
        world.patchset(
            world.entry(when="always", replacement="OURS.switched:make_free", holders=["PKG.user"]),
            world.entry("PKG.other:other", id="other", when="always", replacement="OURS.switched:make_other"),
            world.entry("PKG.core:Engine.run", replacement="OURS.switched:make_run"),
            world.entry("PKG.other:Class.make", replacement="OURS.switched:make_static"),
        )
    for name in [name for name in sys.modules if name.startswith(f"{world.package}.")]:
        del sys.modules[name]
    patches = PatchSet.load(world.ours)
    broken = world.load("OURS.switched").broken
    broken.clear()
    slots = Slots(world)
    armed = applied = False
    try:
        for operation in operations:
            verb, _, what = operation.partition(" ")
            failed = patches.failure
            with contextlib.suppress(PatchError, RuntimeError):
                if verb == "arm":
                    patches.arm()
                elif verb == "apply":
                    patches.apply(role="red", process="worker")
                elif verb == "undo":
                    patches.undo()
                elif verb == "import":
                    world.load(f"PKG.{what}")
                else:
                    (broken.add if verb == "break" else broken.discard)(what)
            armed = verb != "undo" and (armed or verb in ("arm", "apply"))
            applied = verb != "undo" and (applied or (verb == "apply" and patches.failure is None))
            assert verb == "undo" or failed is None or patches.failure is failed, "a failure is sticky"
            for places in (ALWAYS_CORE, ALWAYS_OTHER):
                seen = slots.originals(places)
                assert all(seen) or not any(seen), f"half of {places} after {operation}"
                if not armed:
                    assert all(seen)
                elif patches.failure is None:
                    assert not any(seen)
            role = slots.originals(ROLE)
            assert all(role) or not any(role), f"half of the role's set after {operation}"
            assert applied == (len(role) == len(ROLE) and not any(role))
    finally:
        patches.undo()
    assert all(slots.originals((*ALWAYS_CORE, *ALWAYS_OTHER, *ROLE)))
