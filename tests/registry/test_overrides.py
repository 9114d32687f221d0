"""What goes past a patch though nobody holds the original: overrides, assignments, values that were read at import."""

from __future__ import annotations

import sys

import pytest

from afdpatch.registry import NotInEffect, PatchSet
from tests.registry.conftest import World

BASE = """
import sys
LIMIT = 3
TABLE = {"a": 1}


def free(x, scale=2):
    return x * scale


class Root:
    def run(self, x):
        return "root"


class Engine(Root):
    SIZE = 3

    def only(self, x): ...

    def __init__(self):
        self.number = 0

    def run(self, x):
        return "engine"


class Sub(Engine): ...


class Near(Root): ...
"""
OURS = """
LIMIT = SIZE = 99
TABLE = {}


def free(original):
    def free(x, scale=2): return "ours"
    return free


def run(original):
    def run(self, x): return "ours"
    return run


def only(original):
    def only(self, x): return "ours"
    return only
"""
RUN, SIZE, LIMIT, TABLE = "PKG.core:Engine.run", "PKG.core:Engine.SIZE", "PKG.core:LIMIT", "PKG.core:TABLE"
FAST = "def fast(self, x): return 'fast'\n"
INIT = "        self.number = 0"
# What is done: a text of PKG.core, and what comes in its place; None: at the end; a file's name: a new file.
DRIFT: dict[str, tuple[str, str | None, str]] = {
    "another base first": (
        RUN,
        "class Sub(Engine)",
        "class Mixin:\n    def run(self, x): ...\nclass Sub(Mixin, Engine)",
    ),
    "of an object": (RUN, INIT, f"{INIT}\n        self.run = len"),
    "of an object, annotated": (RUN, INIT, f"{INIT}\n        self.run: object = len"),
    "of a subclass's object": (RUN, "other.py", "from .core import Sub\nclass S(Sub):\n    def x(me): me.run = len\n"),
    "by __getattribute__": (RUN, INIT, f"{INIT}\n\n    def __getattribute__(self, name): ..."),
    "by __getattribute__, a name that is defined once": (
        "PKG.core:Engine.only",
        INIT,
        f"{INIT}\n\n    def __getattribute__(self, name): ...",
    ),
    "assigned under if": (RUN, None, FAST + "if sys:\n    Engine.run = fast"),
    "assigned with an annotation": (RUN, None, FAST + "Engine.run: object = fast"),
    "assigned with another": (RUN, None, FAST + "Engine.run, Engine.n = fast, 1"),
    "assigned by a loop": (RUN, None, FAST + "for Engine.run in (fast,): ..."),
    "deleted from its class": (RUN, None, "del Engine.run"),
    "assigned to a class that inherits it": ("PKG.core:Near.run", None, FAST + "Near.run = fast"),
    "its class imported": (RUN, None, "from .fast import Engine"),
    "its class by a star": (RUN, None, "from .fast import *"),
    "its class elsewhere": (RUN, "class Engine", "if sys:\n    from .fast import Engine\nclass Engine"),
    "its class twice": (RUN, "class Engine", "class Engine:\n    def run(self, x): ...\n\n\nclass Engine"),
    "a package beside the module": ("PKG.core:free", "core/__init__.py", "def free(x, scale=2): ..."),
    "a value of a subclass": (SIZE, "class Sub(Engine): ...", "class Sub(Engine):\n    SIZE = 4"),
    "a value of an object": (SIZE, INIT, f"{INIT}\n        self.SIZE = 4"),
}
READ = {
    "default": (LIMIT, None, "def f(x=LIMIT): ..."),
    "default, elsewhere": (LIMIT, "other.py", "from . import core\ndef f(x=core.LIMIT): ..."),
    "another value": (LIMIT, None, "MORE = LIMIT * 2"),
    "argument": (LIMIT, None, "print(LIMIT)"),
    "condition": (LIMIT, None, "if LIMIT > 5: ..."),
    "text": (LIMIT, None, "TEXT = f'{LIMIT}'"),
    "decorator": (LIMIT, None, "def d(n): return lambda f: f\n@d(LIMIT)\ndef g(): ..."),
    "class's, default": (SIZE, None, "def f(x=Engine.SIZE): ..."),
    "alias of a table": (TABLE, None, "OTHER = TABLE"),
}


def edit(world: World, where: str | None, text: str) -> None:
    if where is not None and where.endswith(".py"):
        world.write(f"{world.package}/{where}", text)
    elif where is None:
        world.write(f"{world.package}/core.py", f"{BASE}\n\n{text}\n")
    else:
        assert where in BASE
        world.write(f"{world.package}/core.py", BASE.replace(where, text, 1))


def pinned(world: World, target: str, when: str = "role") -> PatchSet:
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.package}/fast.py", "class Engine:\n    def run(self, x): ...\n")
    world.write(f"{world.ours}/patches.py", OURS)
    kind = "replace" if target in (SIZE, LIMIT, TABLE) else "wrap"
    world.declare(world.entry(target, kind=kind, when=when))
    assert (world.pin(), world.verify()) == (0, 0)
    return PatchSet.load(world.ours)


@pytest.mark.parametrize("name", DRIFT)
def test_what_would_go_past_a_patch_is_drift_and_known_once_it_is_pinned(world: World, name: str) -> None:
    target, where, text = DRIFT[name]
    pinned(world, target)
    edit(world, where, text)
    assert world.verify() == 4


@pytest.mark.parametrize("name", READ)
def test_a_value_that_is_read_at_import_is_refused_by_its_source(world: World, name: str) -> None:
    target, where, text = READ[name]
    pinned(world, target)
    edit(world, where, text)
    assert world.pin() == 0
    assert world.verify() == 7
    with pytest.raises(NotInEffect, match=rf"{world.package}/(core|other)\.py:\d+"):
        PatchSet.load(world.ours).apply(role="red", process="worker")


@pytest.mark.parametrize(
    "assigned", ["from .core import Engine\nEngine.run = len", "from . import core\ncore.Engine.run = len"]
)
def test_an_assignment_in_another_module_is_refused_for_every_entry(world: World, assigned: str) -> None:
    for when in ("role", "always"):
        pinned(world, RUN, when)
        edit(world, "other.py", assigned)
        assert world.verify() == 7
        assert (world.pin(), world.verify()) == (0, 7)
        patches = PatchSet.load(world.ours)
        with pytest.raises(NotInEffect, match=r"other, which assigns to it"):
            patches.apply(role="red", process="worker") if when == "role" else (patches.arm(), world.load("PKG.core"))
        patches.undo()
        (world.site / world.package / "other.py").unlink()


IMPORTS = {
    "by name": "from .core import LIMIT\n",
    "by star": "from .core import *\n",
    "under try": "try:\n    from .core import LIMIT\nexcept ImportError: ...\n",
    "by module": "from . import core\nLIMIT = core.LIMIT\n",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_a_module_that_read_a_value_before_it_was_armed_is_refused_and_one_afterwards_gets_ours(
    world: World, how: str
) -> None:
    world.write(f"{world.package}/other.py", IMPORTS[how])
    patches = pinned(world, LIMIT, "always")
    other = world.load("PKG.other")
    with pytest.raises(NotInEffect, match=r"other\.py:\d"):
        patches.arm()
    assert other.LIMIT == 3
    patches.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == world.package]:
        del sys.modules[name]
    patches.arm()
    assert world.load("PKG.other").LIMIT == 99
    patches.undo()


@pytest.mark.parametrize("how", [how for how in IMPORTS if how != "by module"])
def test_a_listed_holder_of_a_value_is_rebound_however_it_imports_it(world: World, how: str) -> None:
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.ours}/patches.py", OURS)
    world.write(f"{world.package}/other.py", IMPORTS[how])
    patches = world.patchset(world.entry(LIMIT, kind="replace", holders=["PKG.other"]))
    other = world.load("PKG.other")
    patches.apply(role="red", process="worker")
    assert other.LIMIT == 99
    patches.undo()
    assert other.LIMIT == 3
