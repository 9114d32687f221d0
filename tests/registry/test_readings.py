"""What goes past a patch though nobody holds the original: values that were read, assignments, names bound again."""

from __future__ import annotations

import sys
import time

import pytest

from afdpatch.registry import NotInEffect, PatchSet
from tests.registry.conftest import World
from tests.registry.past import BASE, LIMIT, OURS, RUN, SIZE, TABLE, edit, pinned

READ = {
    "in a comprehension of a class that has the name": (
        LIMIT,
        None,
        "class C:\n    LIMIT = 1\n    y = [LIMIT for _ in (1,)]",
    ),
    "in one of two classes of a name": (
        LIMIT,
        None,
        "if not sys:\n    class C:\n        LIMIT = 1\nelse:\n    class C:\n        y = abs(LIMIT)",
    ),
    "default": (LIMIT, None, "def f(x=LIMIT): ..."),
    "default, elsewhere": (LIMIT, "other.py", "from . import core\ndef f(x=core.LIMIT): ..."),
    "another value": (LIMIT, None, "MORE = LIMIT * 2"),
    "argument": (LIMIT, None, "print(LIMIT)"),
    "condition": (LIMIT, None, "if LIMIT > 5: ..."),
    "text": (LIMIT, None, "TEXT = f'{LIMIT}'"),
    "decorator": (LIMIT, None, "def d(n): return lambda f: f\n@d(LIMIT)\ndef g(): ..."),
    "class's, default": (SIZE, None, "def f(x=Engine.SIZE): ..."),
    "class's, of a name that is given there": (SIZE, "other.py", "from . import core\nprint((Q := core.Engine).SIZE)"),
    "class's, of one of two": (SIZE, "other.py", "from . import core\nprint((core.Engine if core else core).SIZE)"),
    "class's, of one or another": (
        SIZE,
        "other.py",
        "from . import core\nprint(((0 or core).Engine and core.Engine).SIZE)",
    ),
    "class's, in its body": (SIZE, "    SIZE = 3\n", "    SIZE = 3\n    if SIZE > 2: ...\n"),
    "class's, argument in its body": (SIZE, "    SIZE = 3\n", "    SIZE = 3\n    MORE = abs(SIZE)\n"),
    "class's, decorator in its body": (
        SIZE,
        "    SIZE = 3\n",
        "    SIZE = 3\n\n    @(lambda n: len)(SIZE)\n    def f(self): ...\n",
    ),
    "converted, condition": (LIMIT, "LIMIT = 3", "LIMIT = int('3')\nif LIMIT > 5: ..."),
    "of the environment, argument": (LIMIT, "LIMIT = 3", "import os\nLIMIT = int(os.getenv('N', 3))\nprint(LIMIT)"),
    "alias of a table": (TABLE, None, "OTHER = TABLE"),
}


@pytest.mark.parametrize("name", READ)
def test_a_value_that_is_read_at_import_is_refused_by_its_source(world: World, name: str) -> None:
    target, where, text = READ[name]
    pinned(world, target)
    edit(world, where, text)
    assert world.pin() == 0
    assert world.verify() == 7
    with pytest.raises(NotInEffect, match=rf"{world.package}/(core|other)\.py:\d+"):
        PatchSet.load(world.ours).apply(role="red", process="worker")


# What reads another value of the name; the last does so in a module that is a holder and hasn't been imported.
NOT_READ = {
    "of another class": (SIZE, None, "class Second:\n    SIZE = 4\n    MORE = SIZE * 2"),
    "of another class, as a default": (SIZE, None, "class Second:\n    SIZE = 4\n    def f(self, x=SIZE): ..."),
    "of the module": (SIZE, None, "SIZE = 4\nMORE = SIZE * 2"),
    "after it is in effect": (LIMIT, "other.py", "from .core import LIMIT\nMORE = LIMIT * 2"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_reads_another_value_of_the_name_is_in_nobody_s_way(world: World, name: str) -> None:
    target, where, text = NOT_READ[name]
    world.write(f"{world.package}/other.py", "from .core import LIMIT\n")
    world.write(f"{world.ours}/patches.py", OURS)
    edit(world, where, text)
    holders = ["PKG.other"] if target == LIMIT else []
    patches = world.patchset(world.entry(target, kind="replace", when="always", holders=holders))
    assert world.verify() == 0
    patches.arm()
    core, other = world.load("PKG.core"), world.load("PKG.other")
    assert 99 in (core.LIMIT, core.Engine.SIZE) and other.LIMIT == core.LIMIT
    patches.undo()


@pytest.mark.parametrize(
    ("where", "text"),
    [(None, "if LIMIT > 1: ..."), ("other.py", "from .core import LIMIT as limit\nMORE = limit * 2")],
)
def test_a_number_that_source_does_not_show_to_be_one_is_read_by_nobody(
    world: World, where: str | None, text: str
) -> None:
    world.write(f"{world.package}/other.py", "from .core import LIMIT as limit\n")
    edit(world, where, text)
    world.core("LIMIT = 3", "LIMIT = (lambda: 3)()")
    world.write(f"{world.ours}/patches.py", OURS)
    patches = world.patchset(world.entry(LIMIT, kind="replace", holders=["PKG.other"]))
    assert world.load("PKG.other").limit == 3
    with pytest.raises(NotInEffect, match=rf"{world.package}/(core|other)\.py:\d+"):
        patches.apply(role="red", process="worker")


ASSIGNED = {
    "by its class": "from .core import Engine\nEngine.run = len",
    "by its module": "from . import core\ncore.Engine.run = len",
    "with another": "from . import core\ncore.Engine.run, other = make()",
    "in a list": "from . import core\n[other, *core.Engine.run] = make()",
    "by a loop": "from . import core\nfor core.Engine.run in (len,): ...",
    "by with": "from . import core\nwith make() as core.Engine.run: ...",
    "deleted": "from . import core\ndel core.Engine.run",
    "in a class": "from .core import Engine\nclass C:\n    Engine.run = len",
    "by another name": "from . import core\nE = core.Engine\nE.run = len",
    "by another module's name": "from .again import E\nE.run = len",
    "by another module's name, by it": "from . import again\nagain.E.run = len",
    "by another module's name for its module": "from .again import c\nc.Engine.run = len",
    "by another name for another module's": "from . import again\nE = again.E\nE.run = len",
    "by a loop's name": "from . import core\nfor E, run in ((core.Root, 1), (core.Engine, len)):\n    E.run = run",
    "by a name on a condition": "from . import core\nE = core.Root if X else core.Engine\nE.run = len",
    "by a name with another": "from . import core\nX, E = 1, core.Engine\nE.run = len",
    "by a name in an expression": "from . import core\nif (E := core.Engine): E.run = len",
    "by a name that is given there": "from . import core\n(E := core.Engine).run = len",
    "by a name for a part of one of two": "from . import core\nE = (core or X).Engine\nE.run = len",
    "by one of two": "from . import core\n(core.Engine or core.Root).run = len",
    "by a name in an expression or before": "from . import core\nE = core.Engine\nX and (E := core.Root)\nE.run = len",
    "by a class's name": "from . import core\nclass C:\n    E = core.Engine\n    E.run = len",
    "by a class's loop": "from . import core\nclass C:\n    for E in (core.Engine,):\n        E.run = len",
    "by a class's import": "class C:\n    from .core import Engine\n    Engine.run = len",
    "by the module's name, perhaps": "from .core import Engine as E\nclass C:\n    if X: E = None\n    E.run = len",
    "over lines": "from . import core\ncore.Engine.run \\\n    = len",
    "by a name over lines": "from . import core\nE = \\\n    core.Engine\nE.run = len",
    "one of two": "if len:\n    from .fast import Engine\nelse:\n    from .core import Engine\nEngine.run = len",
    "by a name that may have become another's": "from . import core\nE = core.Engine\nif X: E = core.Root\nE.run = len",
    "by a name that becomes another's there": "from . import core\nE = core.Engine\nE.run, E = len, core.Root",
    "in a loop's second round": "from . import core\nE = core.Root\nfor _ in X:\n    E.run = len\n    E = core.Engine",
    "in a condition's second round": "from . import core\nE = X\nwhile E.run:\n    del E.run\n    E = core.Engine",
    "after a loop over nothing": "from . import core\nE = core.Engine\nfor E in (): ...\nE.run = len",
    "in the else of a loop over nothing": "from . import core\nE = core.Engine\nfor E in (): ...\nelse: E.run = len",
    "after a star that may give another": "from . import core\nE = core.Engine\nfrom .maybe import *\nE.run = len",
    "by a loop's own name": "from . import core\nfor E, E.run in ((core.Engine, len),): ...",
    "by a star's name, later another's": "from .core import *\nEngine.run = len\nEngine = None",
    "after what is for checkers": "from typing import TYPE_CHECKING\nfrom .core import Engine\n"
    "if TYPE_CHECKING: Engine = None\nEngine.run = len",
}


# What is done to others by a name that has been the class's, or will be.
REBOUND = {
    "a loop's name": "for E in (core.Engine,): E.x = 1\nfor E in (core.Root,):\n    E.run = len",
    "a loop's name, with another": "for E, x in ((core.Engine, 1),): ...\nfor E, x in ((core.Root, 1),): E.run = x",
    "assigned": "E = core.Engine\nE = core.Root\nE.run = len",
    "assigned later": "E = core.Root\nE.run = len\nE = core.Engine",
    "imported": "from .core import Engine as E\nfrom .core import Root as E\nE.run = len",
    "defined": "from .core import Engine as E\nclass E: ...\nE.run = len",
    "by way of another": "E = core.Root\nF = E\nE = core.Engine\nF.run = len",
    "read": "E = core.Engine\nE = core.Root\nx = E.run",
}


@pytest.mark.parametrize(
    "text",
    ["from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = LIMIT + 1", "def f(x: 'LIMIT') -> LIMIT: ..."],
)
def test_a_value_that_type_checkers_read_is_taken_over_by_nobody(world: World, text: str) -> None:
    pinned(world, LIMIT)
    edit(world, None, text)
    assert (world.pin(), world.verify()) == (0, 0)
    with PatchSet.load(world.ours).applied(role="red", process="worker"):
        assert world.load("PKG.core").LIMIT == 99


@pytest.mark.parametrize("text", ["E = Engine\nE.run = len", "class C:\n    Engine.run = len"])
def test_an_assignment_in_its_own_module_by_another_way_is_refused(world: World, text: str) -> None:
    pinned(world, RUN)
    edit(world, None, f"{text}\n")
    assert world.verify() == 7


def test_names_that_stand_for_each_other_lead_nowhere(world: World) -> None:
    pinned(world, RUN)
    edit(world, None, "A = B.x\nB = A.y\nZ = A.Engine.run\n")
    assert world.verify() == 0


@pytest.mark.parametrize("use", ["class S(A):\n    def run(self, x): ...", "A.Engine.run = len"])
def test_names_that_stand_for_more_and_more_of_each_other_have_an_end(world: World, use: str) -> None:
    pinned(world, RUN)
    world.write(
        f"{world.package}/again.py", "from .core import Engine\nfrom .other import A\nB = A.x or A.y or Engine\n"
    )
    world.write(
        f"{world.package}/other.py", f"from .again import B\nfrom . import core\nA = B.x or B.y or core\n{use}\n"
    )
    start = time.process_time()
    world.verify()
    assert time.process_time() - start < 5


def test_a_function_that_assigns_a_thousand_times_is_read_in_linear_time(world: World) -> None:
    pinned(world, RUN)
    lines = "    E = Engine\n    E.run = len\n" * 1500
    world.write(f"{world.package}/other.py", f"from .core import Engine\ndef f():\n{lines}")
    start = time.process_time()
    assert world.verify() == 4
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", REBOUND)
def test_a_name_stands_for_what_it_was_bound_to_last(world: World, name: str) -> None:
    pinned(world, RUN)
    edit(world, "other.py", f"from . import core\n{REBOUND[name]}\n")
    assert world.verify() == 0
    text = REBOUND[name].replace("\n", "\n    ")
    edit(world, "other.py", f"from . import core\ndef f():\n    {text}\n")
    assert world.verify() == (0 if name == "read" else 4)  # in a function, all that binds it counts


@pytest.mark.parametrize(
    ("before", "inside", "expected"),
    [
        ("E = None", "E = core.Engine\n    x = E.run", 7),
        ("E = core.Engine", "E = core.Root\n    x = E.run", 0),
        ("E = core.Engine", "x = E.run\n    E = core.Root", 7),
        ("E = core.Engine", "E = core.Root\n    x = [E.run for _ in X]", 7),
        ("E = core.Root", "E = core.Engine\n    class D:\n        x = E.run", 0),
        ("E = core.Root", "core = None\n    x = core.Engine.run", 0),
        ("C = core.Engine", "x = C.run", 7),
        ("C = core.Root", "x = C.run", 0),
    ],
)
def test_a_class_s_body_has_names_of_its_own(world: World, before: str, inside: str, expected: int) -> None:
    pinned(world, RUN)
    edit(world, "other.py", f"from . import core\n{before}\nclass C:\n    {inside}\n")
    assert world.verify() == expected


def test_what_reads_a_name_later_reads_what_it_is_then(world: World) -> None:
    pinned(world, RUN)
    edit(world, "other.py", "from . import core\nE = core.Root\nruns = {1: (E.run for _ in X)}\nE = core.Engine\n")
    assert world.verify() == 7
    edit(world, "other.py", "from . import core\nE = core.Root\nruns = {1: [E.run for _ in X]}\nE = core.Engine\n")
    assert world.verify() == 0


@pytest.mark.parametrize("assigned", ASSIGNED.values(), ids=ASSIGNED)
def test_an_assignment_in_another_module_is_refused_for_every_entry(world: World, assigned: str) -> None:
    for when in ("role", "always"):
        pinned(world, RUN, when)
        world.write(f"{world.package}/maybe.py", "if X: E = None\n")
        world.write(f"{world.package}/again.py", "from . import core as c\nE = X or c.Engine\n")
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
    other = world.load("PKG.other")
    assert other.LIMIT == 99
    patches.undo()
    left = 99 if how == "by module" else 3  # what read it by its module has it for good
    assert left == other.LIMIT


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


INSTEAD = {
    "an import": "if X:\n    from .fast import free\n",
    "a star": "try:\n    from .fast import *\nexcept ImportError: ...\n",
    "a definition": "if X:\n    def free(x, scale=2): ...\n",
    "a value": "free = getattr(X, 'free', free)\n",
}


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize("when", ["role", "always"])
def test_what_a_holder_may_have_in_the_target_s_place_is_drift(world: World, name: str, when: str) -> None:
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.package}/fast.py", "def free(x, scale=2): ...\n")
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.write(f"{world.ours}/patches.py", OURS)
    world.declare(world.entry(when=when, holders=["PKG.user"]))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/user.py", f"from .core import free\n{INSTEAD[name]}")
    assert world.verify() == 4
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/user.py", f"{INSTEAD['an import']}from .core import free\n")
    assert world.verify() == 0
