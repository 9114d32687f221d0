"""What tests of what goes past a patch share: a module, its patches, and how the module is edited."""

from __future__ import annotations

from afdpatch.registry import PatchSet
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


class Left(Root): ...


class Other(Root):
    def run(self, x): ...


class Last(Left): ...
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


def edit(world: World, where: str | None, text: str) -> None:
    world.write(f"{world.package}/core.py", BASE)
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
