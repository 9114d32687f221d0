"""By which names a target is kept or assigned to, what binds a name, and source that is deep or long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afdpatch.cli import compat as compat_command
from afdpatch.registry import Lock, NotInEffect, PatchSet, lock_path
from tests.registry.conftest import World, command
from tests.registry.past import BASE, LIMIT, OURS, RUN, SIZE


def pinned(world: World, target: str = "PKG.core:free", source: str = BASE, **keys: Any) -> None:
    world.write(f"{world.package}/core.py", source)
    world.write(f"{world.ours}/patches.py", OURS)
    kind = "replace" if target in (SIZE, LIMIT) else "wrap"
    world.declare(world.entry(target, kind=kind, **keys))
    assert world.pin() == 0


def compat(world: World) -> int:
    return command(compat_command, "compat", "--manifest", str(world.manifest), str(world.site))


# What the statement of a symbol has: symbol, source, and what is changed.
STATEMENTS = {
    "unpacked in another order": ("LOW", "LOW, HIGH = 1, 2\n", "LOW, HIGH", "HIGH, LOW"),
    "another operator": ("LOW", "LOW = 1\nLOW += 1\n", "+=", "-="),
    "another part of a loop's item": ("LOW", "for LOW, HIGH in [(1, 2)]: ...\n", "LOW, HIGH", "HIGH, LOW"),
    "another part of a case": ("LOW", "match [1, 2]:\n    case [LOW, HIGH]: ...\n", "LOW, HIGH", "HIGH, LOW"),
    "another case's condition": (
        "f",
        "match 1:\n    case 1 if True:\n        def f(): ...\n    case _: ...\n",
        "if True",
        "if False",
    ),
    "another subject": ("f", "match 1:\n    case 1:\n        def f(): ...\n", "match 1", "match 2"),
    "another loop": ("f", "def f(): return 1\nfor _ in ():\n    def f(): return 2\n", "in ()", "in (1,)"),
    "another manager": ("f", "with open('a'):\n    def f(): ...\n", "'a'", "'b'"),
    "an attribute by unpacking": (
        "C.f",
        "class C:\n    def f(self): ...\nC.f, C.g = len, print\n",
        "C.f, C.g",
        "C.g, C.f",
    ),
    "a starred part": ("LOW", "LOW, *HIGH = [1, 2, 3]\n", "LOW, *HIGH", "*HIGH, LOW"),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_all_of_a_statement_counts(world: World, name: str) -> None:
    symbol, source, old, new = STATEMENTS[name]
    world.write(f"{world.package}/fp.py", source)
    pinned(world, RUN, relies=[f"PKG.fp:{symbol}"])
    assert world.verify() == 0
    world.write(f"{world.package}/fp.py", source.replace(old, new))
    assert (world.verify(), compat(world)) == (4, 4)


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("Both.run", "", "class Mixin:\n    run: object\nclass Both(Mixin, Engine): ...\n", ('"engine"', '"changed"')),
        ("Sub.SIZE", "class Sub(Engine): ...", "class Sub(Engine):\n    SIZE: int", ("SIZE = 3", "SIZE = 4")),
    ],
)
def test_an_annotation_alone_binds_nothing(
    world: World, name: str, old: str, new: str, changed: tuple[str, str]
) -> None:
    pinned(world, source=BASE.replace(old, new) if old else BASE + new, relies=[f"PKG.core:{name}"])
    assert world.verify() == 0
    world.core(*changed)
    assert (world.verify(), compat(world)) == (4, 4)


def test_an_annotation_alone_overrides_nothing_and_is_no_target(world: World) -> None:
    pinned(world, SIZE)
    world.core("class Sub(Engine): ...", "class Sub(Engine):\n    SIZE: int")
    assert world.verify() == 0
    world.core("SIZE = 3", "SIZE: int")
    assert (world.pin(), world.verify()) == (3, 3)


AGAIN = "from .core import free, free as f, Engine as Base\n"
# Target, code of PKG.user, holders
KEPT = {
    "through a module that imports it on": ("PKG.core:free", "from . import again\nT = [again.free]", ["PKG.again"]),
    "through it by another name": ("PKG.core:free", "from . import again\nT = [again.f]", ["PKG.again"]),
    "a method of a renamed class": (RUN, "from .again import Base\nT = [Base.run]", []),
    "a method by a subclass": (RUN, "from .core import Sub\nT = [Sub.run]", []),
    "a method by another name of its class": (RUN, "from . import core\nE = core.Engine\nT = [E.run]", []),
    "renamed under try": (
        "PKG.core:free",
        "try:\n    from .core import free as f\nexcept ImportError: ...\nT = [f]",
        ["PKG.again", "PKG.user"],
    ),
    "in a class body": ("PKG.core:free", "class C:\n    from .core import free", ["PKG.again", "PKG.user"]),
    "by a loop": ("PKG.core:free", "from . import core\nfor f in (len, core.free): ...", ["PKG.again"]),
    "by a loop over a dictionary": (
        "PKG.core:free",
        "from . import core\nfor n, f in {'a': core.free}.items(): ...",
        ["PKG.again"],
    ),
    "a table that a loop fills": (
        "PKG.core:free",
        "from . import core\nT = {}\nfor n, f in (('a', core.free), ('b', len)):\n    T[n] = f\ndel n, f",
        ["PKG.again"],
    ),
    "walrus": ("PKG.core:free", "from . import core\nif (f := core.free): ...", ["PKG.again"]),
    "a star without a space": ("PKG.core:free", "from .core import*", ["PKG.again"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_who_keeps_the_original_is_refused_by_verify_and_at_run_time_alike(world: World, name: str) -> None:
    target, code, holders = KEPT[name]
    world.write(f"{world.package}/again.py", AGAIN)
    world.write(f"{world.package}/user.py", code)
    pinned(world, target, holders=holders)
    assert world.verify() == 7
    world.load("PKG.user")
    with pytest.raises(NotInEffect):
        PatchSet.load(world.ours).apply(role="red", process="worker")


def test_a_star_gives_what_all_lists(world: World) -> None:
    """A private name that is listed, and not another that isn't."""
    world.write(f"{world.package}/core.py", "__all__ = ['_free']\ndef _free(x, scale=2): ...\ndef other(): ...\n")
    world.write(f"{world.package}/user.py", "from .core import *\n")
    world.write(f"{world.ours}/patches.py", OURS)
    world.declare(
        world.entry("PKG.core:_free", id="a", replacement="OURS.patches:free"),
        world.entry("PKG.core:other", id="b", replacement="OURS.patches:free"),
    )
    assert (world.pin(), world.verify()) == (0, 7)
    holders = Lock.read(lock_path(world.manifest, "1.0")).holders
    assert holders == {f"{world.package}.core:_free": (f"{world.package}.user",), f"{world.package}.core:other": ()}


def test_a_number_that_is_read_through_another_module_is_refused(world: World) -> None:
    world.write(f"{world.package}/again.py", "from .core import LIMIT\n")
    world.write(f"{world.package}/user.py", "from . import again\nOTHER = again.LIMIT\n")
    pinned(world, LIMIT, holders=["PKG.again"])
    assert world.verify() == 7


@pytest.mark.parametrize(
    "code",
    [
        "from . import core\nfor f in (core.free, len):\n    print(f)",
        "from . import again\nx = again.free(1)",
        "from . import again\ndef use(): return [again.free]",
    ],
)
def test_what_only_passes_it_on_is_no_keeper_for_sure(world: World, code: str) -> None:
    world.write(f"{world.package}/again.py", AGAIN)
    world.write(f"{world.package}/user.py", code)
    pinned(world, holders=["PKG.again"])
    assert world.verify() == 0


ASSIGNS = {
    "another module's function": "from . import core\ndef patch():\n    core.Engine.run = len\n",
    "a function with its own import": "def patch():\n    from .core import Engine\n    Engine.run = len\n",
    "a method": "from .core import Engine\nclass C:\n    def patch(self):\n        Engine.run = len\n",
}


@pytest.mark.parametrize("name", ASSIGNS)
def test_a_function_that_assigns_to_the_target_is_drift(world: World, name: str) -> None:
    pinned(world, RUN, when="always")
    world.write(f"{world.package}/other.py", ASSIGNS[name])
    assert (world.verify(), world.pin(), world.verify()) == (4, 0, 0)


def test_a_function_that_has_the_target_as_a_global_is_drift(world: World) -> None:
    pinned(world)
    world.core("class Root:", "def setup():\n    global free\n    free = len\n\n\nclass Root:")
    assert world.verify() == 4


def test_a_holder_of_a_name_that_isn_t_ascii(world: World) -> None:
    world.write(f"{world.package}/core.py", "def largué(x, scale=2): ...\n")
    world.write(f"{world.ours}/patches.py", OURS)
    world.declare(world.entry("PKG.core:largué", id="a", replacement="OURS.patches:free"))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/other.py", "from .core import largué\n")
    assert world.verify() == 7
    world.write(f"{world.package}/other.py", "from . import core\nT = [core.largué]\n")
    assert world.verify() == 7


DEEP = {
    "sum": "X = " + " + ".join(["1"] * 1500),
    "calls": "X = lambda a: a" + ".b(1)" * 450,
    "elif": "import sys\nif sys == 0: ...\n" + "".join(f"elif sys == {i}: ...\n" for i in range(1500)),
    "number": f"X = {{0x{'f' * 5000}: 1}}",
}


@pytest.mark.parametrize("where", ["target", "its module", "a module that refers to it"])
@pytest.mark.parametrize("name", DEEP)
def test_source_that_is_deep_or_long(world: World, name: str, where: str) -> None:
    """Python takes it, so do we: no walk is recursive, no number is written in decimal."""
    inside = "".join(f"    {line}\n" for line in DEEP[name].splitlines())
    head = "def free(x, scale=2):\n"
    source = BASE.replace(head, head + inside) if where == "target" else BASE
    user = f"from . import core\nprint(core.free)\n{DEEP[name] if where.startswith('a mod') else ''}\n"
    world.write(f"{world.package}/user.py", user)
    pinned(world, source=f"{source}\n{DEEP[name] if where == 'its module' else ''}\n")
    assert world.verify() == 0


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, item in inside for place in places(item, (*at, key)))]


def test_a_lock_that_is_damaged_somewhere_is_an_error_by_name(world: World) -> None:
    pinned(world, relies=[RUN])
    path = lock_path(world.manifest, "1.0")
    whole = path.read_text()
    for at in places(json.loads(whole)):
        for new in (None, 5, "x", [], {}, ["x"], {"x": 1}):
            data = inner = json.loads(whole)
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = new
            path.write_text(json.dumps(data))
            assert isinstance(world.verify(), int), (at, new)
    path.write_text("[" * 100_000)
    assert world.verify() == 5
