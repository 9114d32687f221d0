"""What goes past a patch though nobody holds the original: overrides, in whatever way a class has them."""

from __future__ import annotations

import time

import pytest

from afdpatch.registry import NotInEffect, SourceTree
from afdpatch.registry.overrides import leads
from tests.registry.conftest import World
from tests.registry.past import BASE, OURS, RUN, SIZE, edit, pinned

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
    "of its class, by type()": (RUN, INIT, f"{INIT}\n        type(self).run = len"),
    "of its class, by __class__": (RUN, INIT, f"{INIT}\n        self.__class__.run, x = len, 1"),
    "of a subclass, by another module": (RUN, "other.py", "from .core import Sub as S\nS.run = len\n"),
    "of a subclass, by a function": (
        RUN,
        "other.py",
        "from . import core\ndef f():\n    E = core.Sub\n    E.run, x = len, 1\n",
    ),
    "of a class, by a function in a function": (
        RUN,
        "other.py",
        "def f():\n    def g():\n        from .core import Engine as E\n        E.run = len\n",
    ),
    "of its module, by a function in a function": (
        "PKG.core:free",
        None,
        "def f():\n    def g():\n        global free\n        free = len\n",
    ),
    "of a class, in a class of a function": (
        RUN,
        "other.py",
        "def f():\n    class C:\n        from .core import Engine as E\n        E.run = len\n",
    ),
    "assigned under if": (RUN, None, FAST + "if sys:\n    Engine.run = fast"),
    "assigned with an annotation": (RUN, None, FAST + "Engine.run: object = fast"),
    "assigned with another": (RUN, None, FAST + "Engine.run, Engine.n = fast, 1"),
    "assigned by a loop": (RUN, None, FAST + "for Engine.run in (fast,): ..."),
    "deleted from its class": (RUN, None, "del Engine.run"),
    "assigned to a class that inherits it": ("PKG.core:Near.run", None, FAST + "Near.run = fast"),
    "its class elsewhere": (RUN, "class Engine", "if sys:\n    from .fast import Engine\nclass Engine"),
    "its class twice": (RUN, "class Engine", "class Engine:\n    def run(self, x): ...\n\n\nclass Engine"),
    "a package beside the module": ("PKG.core:free", "core/__init__.py", "def free(x, scale=2): ..."),
    "a value of a subclass": (SIZE, "class Sub(Engine): ...", "class Sub(Engine):\n    SIZE = 4"),
    "a value of an object": (SIZE, INIT, f"{INIT}\n        self.SIZE = 4"),
    "of a base's object": (RUN, "class Root:\n", "class Root:\n    def __init__(self):\n        self.run = len\n\n"),
    "of an object, by a method under if": (
        RUN,
        INIT,
        f"{INIT}\n\n    if sys:\n        def other(self): self.run = len",
    ),
    "of an object of another base": (
        RUN,
        "class Sub(Engine)",
        "class Mixin:\n    def x(self): self.run = len\nclass Sub(Mixin, Engine)",
    ),
    "a known override comes between": ("PKG.core:Root.run", "class Last(Left)", "class Last(Left, Other)"),
}


# What a subclass does with a name that nothing else in the package binds.
ONCE = {
    "__getattribute__": "def __getattribute__(self, n): ...",
    "unpacked": "only, more = len, len",
    "an object's, unpacked": "def x(self): self.only, self.b = 1, 2",
    "a loop": "for only in (len,): ...",
    "imported over several lines": "from builtins import (\n        len as\n        only,\n    )",
    "under a call": "only = staticmethod(len)",
    "deleted on a condition": "only = len\n    if X: del only",
    "a slot": "__slots__ = ('only', 'x')",
    "a slot with its description": "__slots__ = {'only': 'A text.'}",
    "the only slot": "__slots__ = 'only'",
}


DRIFT |= {
    f"in a subclass: {name}": ("PKG.core:Engine.only", "class Sub(Engine): ...", f"class Sub(Engine):\n    {text}")
    for name, text in ONCE.items()
}


BODY = ":\n    def run(self, x): ...\n"


DEEP = ":\n        def run(self, x): ...\n"


TRY = "try:\n    from {} import Engine\nexcept ImportError:\n    {}\nclass S(Engine)"


# A new module's text: how a subclass may be written.
SUBCLASSES = {
    "an alias below a docstring with a number in it": (
        '"""Engines.\n\nThose that are quick (#12).\n"""\nfrom .core import Engine\nQuick = Engine\nclass S(Quick)'
        + BODY
    ),
    "an alias below one that isn't English": (
        '"""Engines.\n\n(the engine\'s own) isn\'t :(\n"""\nfrom . import core\nQuick = core.Engine\nclass S(Quick)'
        + BODY
    ),
    "an alias on the line of a condition": "from . import core\nif core.V == 1: Quick = core.Engine\nclass S(Quick)"
    + BODY,
    "a call among the bases": f"from .core import Engine\ndef mixin(): return object\nclass S(mixin(), Engine){BODY}",
    "a comment among the bases": f"from .core import Engine\nclass S(\n    G,  # class (1)\n    Engine,\n){BODY}",
    "a text among the bases": f"from .core import Engine\nclass S(G['a)'], Engine){BODY}",
    "another name": f"from .core import Engine\nBase = Engine\nclass S(Base){BODY}",
    "another name, annotated": f"from . import core\nBase: type = core.Engine  # it\nclass S(Base){BODY}",
    "another name that may have become another's": "from .core import Engine, Root\n"
    f"Base = Engine\nX and (Base := Root)\nclass S(Base){BODY}",
    "another name after a loop over nothing": "from .core import Engine\n"
    f"Base = Engine\nfor Base in (): ...\nclass S(Base){BODY}",
    "another name after a case": "from .core import Engine\n"
    f"Base = Engine\nmatch X:\n    case [Base]: ...\nclass S(Base){BODY}",
    "a star after it, which may give another": f"from .core import Engine\nfrom .maybe import *\nclass S(Engine){BODY}",
    "a tuple of bases that grew": f"from .core import Engine\nBASES = (Engine,)\nBASES += (X,)\nclass S(*BASES){BODY}",
    "a tuple of bases that it came into": "from .core import Engine\n"
    f"BASES = (X,)\nBASES += (Engine,)\nclass S(*BASES){BODY}",
    "another name in an expression": f"from . import core\nprint(Base := core.Engine)\nclass S(Base){BODY}",
    "another name in a condition": f"from .core import Engine\nif (Base := X or Engine): ...\nclass S(Base){BODY}",
    "another name in a value": f"from .core import Engine\nx = [\n    (Base := Engine),\n]\nclass S(Base){BODY}",
    "another name in an expression, elsewhere": f"from .walrus import Base\nclass S(Base){BODY}",
    "another name on the next line": f"from . import core\nBase = \\\n    core.Engine\nclass S(Base){BODY}",
    "another name by a call on the next line": "from .core import Engine\n"
    f"Base = \\\n    mixed(Engine, X)\nclass S(Base){BODY}",
    "another name on the line after": f"from .core import Engine\nBase \\\n    = Engine\nclass S(Base){BODY}",
    "another name or, on the next line": f"from .core import Engine\nBase = Engine \\\n    or X\nclass S(Base){BODY}",
    "another name below a comment with a backslash": "from .core import Engine\n"
    f"# a \\\nBase = mixed(Engine, X)\nclass S(Base){BODY}",
    "renamed over lines": f"from .core import Engine as\\\n    Base\nclass S(Base){BODY}",
    "another name in a function": f"from . import core\ndef f():\n    B = core.Engine\n    class S(B){DEEP}",
    "imported on under another name": f"from .again import Base\nclass S(Base){BODY}",
    "assigned on under another name": f"from .again import Other\nclass S(Other){BODY}",
    "its own name": f"from .core import Engine\nclass Engine(Engine){BODY}",
    "twice of its own name": f"from .core import Engine\nclass Engine(Engine): ...\nclass Engine(Engine){BODY}",
    "another name for checkers": "from typing import TYPE_CHECKING\nfrom .core import Engine as Base\n"
    f"if TYPE_CHECKING:\n    class _B: ...\nelse:\n    _B = Base\nclass Engine(_B){BODY}",
    "by a star": f"from .core import *\nclass S(Engine){BODY}",
    "under another name by a star": f"from .again import *\nclass S(Base){BODY}",
    "one of two": TRY.format(".core", "class Engine: ...") + BODY,
    "the other of two": TRY.format("fast", "from .core import Engine") + BODY,
    "made by a call": f"from .core import Engine\nclass S(as_embedding(Engine)){BODY}",
    "another name in brackets": f"from . import core\nBase = (\n    core.Engine\n)\nclass S(Base){BODY}",
    "another name on a condition": f"from . import core\nBase = object if X else core.Engine\nclass S(Base){BODY}",
    "another name if there is none": f"from .core import Engine\nBase = X or Engine\nclass S(Base){BODY}",
    "another name with another": f"from .core import Engine\nX, Base = 1, Engine\nclass S(Base){BODY}",
    "another name by a call": "from .core import Engine\n"
    f"Base = mixed(\n    X,  # (1)\n    Engine,\n)\nclass S(Base){BODY}",
    "another name by a call, elsewhere": f"from .made import Mixed\nclass S(Mixed){BODY}",
    "its own name by a call": f"from .core import Engine\nEngine = mixed(Engine)\nclass S(Engine){BODY}",
    "a tuple of bases": f"from .core import Engine\nBASES = (X, Engine)\nclass S(*BASES){BODY}",
    "a base named like a class statement": f"from .core import Engine\nclass S(\n    class_of.X,\n    Engine,\n){BODY}",
    "generic": f"from .core import Engine\nclass S(Generic[T], Engine[T]){BODY}",
    "in a function": f"def f():\n    from .core import Engine\n    class S(Engine){DEEP}",
    "in a class of its name": f"from .core import Engine\nclass Engine:\n    class S(Engine){DEEP}",
    "in a class that may have its own": "from .core import Engine\n"
    f"class O:\n    if X: Engine = X\n    class S(Engine){DEEP}",
    "in a class": f"from .core import Engine\nclass O:\n    class B(Engine): ...\n    class S(B){DEEP}",
    "of one in a class": f"from .core import Engine\nclass O:\n    class B(Engine): ...\nclass S(O.B){BODY}",
    "assigned to it": "from .core import Engine\nclass S(Engine): ...\nS.run = len\n",
    "below a class without": f"from .core import Sub\nclass A(Sub): ...\nclass B(A): ...\nclass C(B){BODY}",
}


# What stands at the end of PKG.core, and overrides nothing.
NO_OVERRIDES = {
    "a base without it comes first": (RUN, "class Deep(Near, Engine): ..."),
    "a stub for checkers": (RUN, "class S(Engine):\n    if TYPE_CHECKING:\n        def run(self, x): ..."),
    "an inherited target": ("PKG.core:Sub.run", "class Deep(Sub, Left): ..."),
    "a base under an override": ("PKG.core:Root.run", "class Deep(Other): ..."),
    "in brackets": (RUN, f"class S(G[Engine]){BODY}"),
    "another class of its name": (
        RUN,
        f"class O:\n    class Engine: ...\n    class S(Engine){DEEP}",
    ),
}


@pytest.mark.parametrize("name", DRIFT)
def test_what_would_go_past_a_patch_is_drift_and_known_once_it_is_pinned(world: World, name: str) -> None:
    target, where, text = DRIFT[name]
    pinned(world, target)
    edit(world, where, text)
    assert world.verify() == 4


@pytest.mark.parametrize("text", ["from .fast import Engine", "from .fast import *"])
def test_a_class_that_an_import_takes_the_place_of_has_moved(world: World, text: str) -> None:
    pinned(world, RUN)
    edit(world, None, text)
    assert world.verify() == 3


@pytest.mark.parametrize("name", SUBCLASSES)
def test_an_override_is_seen_however_its_class_is_written(world: World, name: str) -> None:
    world.write(f"{world.package}/again.py", "from .core import Engine as Base\nOther = Base\n")
    world.write(f"{world.package}/maybe.py", "if X: Engine = None\n")
    world.write(f"{world.package}/walrus.py", "from . import core\nif (Base := core.Engine): ...\n")
    world.write(f"{world.package}/made.py", "from . import core\nMixed = cast(type, mixed(core.Engine))\n")
    pinned(world, RUN)
    world.write(f"{world.package}/other.py", SUBCLASSES[name])
    assert world.verify() == 4


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("class Sub[T](Engine)", True),
        ("class Sub[T: (int, str)](Engine)", True),
        ("class Sub(a(b(c)), Engine)", True),
        ("class Sub(Other): x: f(Engine)", False),
        ("class Sub:\n    def f(self, x: Engine): ...", False),
        ("text = 'class Sub(', 'Engine", False),
        ("classes(\nEngine", False),
        ("A = B = x.Engine  # it", True),
        ("A: type = f(\n    'a', (1, 2),\n    Engine", True),
        ("A = f(\n    a='b)',\n    b=Engine[int],", True),
        ("A = Engine(1)", False),
        ("A = Engine\\\n.b", True),
        ("A = Engine.b", False),
        ("A = MyEngine", False),
        ("A = \\\n    x.Engine", True),
        ("A = f(1, \\\r\n    Engine", True),
        ("(A := Engine", True),
        ("if (A := x.Engine) or B: ...", True),
        ("A[x:=Engine", True),
        ("(a := 1, Engine", True),
        ("(a := 1), Engine", False),
        ("f(\n    a=Engine,\n)", False),
        ("A = {\n    'a': Engine,\n}", False),
        ("A = 'a', 'Engine'", False),
        ("if A == Engine", False),
        ("from x import (\n    Engine,\n)", False),
    ],
)
def test_the_bases_in_the_text_of_a_class(text: str, there: bool) -> None:
    """Type parameters are of Python 3.12."""
    assert leads(text.encode(), b"Engine") is there


@pytest.mark.parametrize("name", NO_OVERRIDES)
def test_what_overrides_nothing_is_no_drift(world: World, name: str) -> None:
    target, text = NO_OVERRIDES[name]
    pinned(world, target)
    edit(world, None, text)
    assert world.verify() == 0


def test_an_object_hides_a_cached_property_and_no_plain_one(world: World) -> None:
    for decorator, expected in (("functools.cached_property", 4), ("property", 0)):
        source = f"import functools\nclass Engine:\n    @{decorator}\n    def run(self): return 1\n"
        world.write(f"{world.package}/core.py", source)
        world.declare(world.entry(RUN))
        assert (world.pin(), world.verify()) == (0, 0)
        world.write(f"{world.package}/core.py", f"{source}    def __init__(self): self.run = 4\n")
        assert world.verify() == expected


@pytest.mark.parametrize("call", ["super().run(x)", "super(Sub, self).run(x)", "Engine.run(self, x)"])
def test_an_override_that_no_longer_calls_what_it_overrides_is_drift(world: World, call: str) -> None:
    sub = "class Sub(Engine):\n    def run(self, x):\n        return {}\n"
    world.write(f"{world.package}/core.py", BASE.replace("class Sub(Engine): ...\n", sub.format(call)))
    world.write(f"{world.ours}/patches.py", OURS)
    world.declare(world.entry(RUN))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/core.py", BASE.replace("class Sub(Engine): ...\n", sub.format(f"1 + {call}")))
    assert world.verify() == 0
    world.write(f"{world.package}/core.py", BASE.replace("class Sub(Engine): ...\n", sub.format("self.run(x)")))
    assert world.verify() == 4
    for value in ("run = Root.run", "run = lambda self, x: 1", "run: object = None"):
        text = f"class Sub(Engine):\n    {value}\n"
        world.write(f"{world.package}/core.py", BASE.replace("class Sub(Engine): ...\n", text))
        assert world.verify() == 4
    world.write(f"{world.package}/core.py", BASE.replace("class Sub(Engine): ...\n", sub.format("self.run(x)")))
    assert (world.pin(), world.verify()) == (0, 0)


# What an override does that called what it overrides, and what is said of it.
GOES_ON = {
    "by a name": ("s = super()\n        return s.run(x)", 0),
    "by an annotated name": ("s: object = super(Sub, self)\n        return s.run(x)", 0),
    "by a name with another": ("s, t = super(), 1\n        return s.run(x)", 0),
    "by a name in an expression": ("return (s := super()).run(x)", 0),
    "by a name in an expression before": ("(s := super())\n        return s.run(x)", 0),
    "by one of two": ("return (super() if x else super(Sub, self)).run(x)", 0),
    "by a name for itself too": ("s = super()\n        s = self\n        return s.run(x)", 4),
    "by a name for itself on a condition": ("s = super() if x else self\n        return s.run(x)", 4),
    "by a parameter's name": ("s = super()\n        return (lambda s: s.run(x))(self)", 4),
    "by a loop's name": ("s = super()\n        return [s.run(x) for s in (self,)]", 4),
    "by a name that a function of it gives away": (
        "s = super()\n        def f():\n            nonlocal s\n            s = self\n        return s.run(x)",
        4,
    ),
    "by another's name": ("s = super()\n        return s.other.run(x)", 4),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_an_override_calls_what_it_overrides_by_a_name_too(world: World, name: str) -> None:
    body, expected = GOES_ON[name]
    sub = "class Sub(Engine):\n    def run(self, x):\n        {}\n"
    world.write(f"{world.ours}/patches.py", OURS)
    edit(world, "class Sub(Engine): ...\n", sub.format("return super().run(x)"))
    world.declare(world.entry(RUN))
    assert (world.pin(), world.verify()) == (0, 0)
    edit(world, "class Sub(Engine): ...\n", sub.format(body))
    assert world.verify() == expected


def test_a_private_name_is_overridden_by_a_class_of_the_same_name_only(world: World) -> None:
    body = ":\n    def __run(self, x): ...\n    def __init__(self): self.__run = len\n"
    world.write(f"{world.package}/core.py", "class Engine:\n    def __run(self, x): ...\n")
    world.declare(world.entry("PKG.core:Engine.__run", id="a", replacement="OURS.patches:run"))
    assert (world.pin(), world.verify()) == (0, 0)
    for name, expected in (("Sub", 0), ("Engine", 4), ("_Engine", 4)):
        world.write(f"{world.package}/other.py", f"from . import core\nclass {name}(core.Engine){body}")
        assert world.verify() == expected, name


def test_a_name_that_is_not_ascii_is_overridden(world: World) -> None:
    world.write(f"{world.package}/core.py", "class Engiñe:\n    def largué(self, x): ...\n")
    world.declare(world.entry("PKG.core:Engiñe.largué", id="a", replacement="OURS.patches:run"))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(
        f"{world.package}/other.py", "from .core import Engiñe\nclass Ä(Engiñe): ...\nclass Ö(Ä):\n    largué = 1\n"
    )
    assert world.verify() == 4


@pytest.mark.parametrize("words", ["only Engine ", "A", "for x as y ", ".only x ", "from", "global "])
def test_a_long_line_is_searched_in_linear_time(world: World, words: str) -> None:
    pinned(world, "PKG.core:Engine.only")
    name = "" if words == "A" else "print(Engine.only)"
    world.write(f"{world.package}/data.py", f"X = '{words * 60_000}'\n{name}  # .only, import *\n")
    start = time.process_time()
    assert world.verify() == 0
    assert time.process_time() - start < 3


@pytest.mark.parametrize("words", ["from.", "from .", ". import ", "free ", "fromfree", "import "])
def test_a_long_line_is_searched_for_stars_in_linear_time(world: World, words: str) -> None:
    pinned(world, "PKG.core:free")
    world.write(f"{world.package}/data.py", f"X = '{words * 20_000}'  # import *\nfree = 1\n")
    start = time.process_time()
    assert world.verify() == 0
    assert time.process_time() - start < 3


# How a name may lead to the class a thousand times: before, for each number, and after.
CHAINS = {
    "aliases": ("from .core import Engine as E0", "E{1} = E{0}", "class S(E1000): run = len"),
    "assignments": ("from .core import Engine as E0", "E{1} = E{0}", "E1000.run = len"),
    "one name": ("from .core import Engine as E", "E = E", "class S(E): run = len"),
    "one of two": ("from .core import Engine as E0", "if X: E{1} = E{0}\nelse: E{1} = X or E{0}", "E1000.run = len"),
    "in a function": ("def f():\n from .core import Engine as E0", " E{1} = E{0}", " class S(E1000): run = len"),
    "in a class": ("from .core import Engine\nclass A:\n E0 = Engine", " E{1} = E{0}", "class S(A.E1000): run = len"),
    "subclasses": ("from .core import Engine as E0", "class E{1}(E{0}): ...", "class S(E1000): run = len"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_name_is_followed_a_thousand_times(world: World, name: str) -> None:
    pinned(world, RUN)
    before, each, after = CHAINS[name]
    text = [before, *(each.format(number, number + 1) for number in range(1000)), after]
    world.write(f"{world.package}/other.py", "\n".join(text) + "\n")
    start = time.process_time()
    assert world.verify() == (7 if "E1000.run" in after else 4)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("text", ["from .m{} import Engine, free", "from .m{} import *"])
def test_a_name_is_followed_through_hundreds_of_modules(world: World, text: str) -> None:
    pinned(world, RUN)
    world.write(f"{world.package}/m0.py", "from .core import Engine, free\n")
    for number in range(600):
        world.write(f"{world.package}/m{number + 1}.py", text.format(number))
    world.write(f"{world.package}/other.py", "from .m600 import Engine\nclass S(Engine): run = len\nEngine.run = len\n")
    assert world.verify() == 7
    tree = SourceTree.at(world.package, world.site)
    assert tree.definition(f"{world.package}.m600", "free") == f"{world.package}.core:free"


def test_the_lineage_of_a_class_below_a_thousand_is_known_from_its_end(world: World) -> None:
    text = ["class B0:\n    def run(self): ...", *(f"class B{number + 1}(B{number}): ..." for number in range(1000))]
    world.write(f"{world.package}/core.py", "\n".join(text) + "\n")
    tree = SourceTree.at(world.package, world.site)
    assert tree.resolve(f"{world.package}.core:B1000.run").defined_as == f"{world.package}.core:B0.run"


def test_what_a_decorator_is_called_is_followed_a_thousand_times(world: World) -> None:
    text = ["import functools\nC0 = functools.cache", *(f"C{number + 1} = C{number}" for number in range(1000))]
    world.write(f"{world.package}/core.py", "\n".join([*text, "@C1000\ndef free(x, scale=2): ...\n"]))
    world.declare(world.entry())
    assert (world.pin(), world.verify()) == (0, 2)


DATACLASS = "import dataclasses\nfrom .core import Engine\n"


GENERATED = {
    "its method": ("Engine.__init__", "@dataclasses.dataclass\nclass S(Engine): ...\n", 4),
    "its method, by a call": ("Engine.__init__", "@dataclasses.dataclass(init=True)\nclass S(Engine): ...\n", 4),
    "not its method": ("Engine.__init__", "@dataclasses.dataclass(init=False)\nclass S(Engine): ...\n", 0),
    "no method": (RUN, "@dataclasses.dataclass\nclass S(Engine): ...\n", 0),
    "a field": (RUN, "@dataclasses.dataclass\nclass S(Engine):\n    run: object\n", 7),
    "a field of a model": (RUN, "from pydantic import BaseModel\nclass S(BaseModel, Engine):\n    run: object\n", 7),
    "a field under if": (RUN, "@dataclasses.dataclass\nclass S(Engine):\n    if Engine:\n        run: object\n", 7),
    "a field, in a function": (
        RUN,
        "def f():\n    @dataclasses.dataclass\n    class S(Engine):\n        run: object\n",
        4,
    ),
    "no field": (
        RUN,
        "from typing import ClassVar\n@dataclasses.dataclass\nclass S(Engine):\n    run: ClassVar[object]\n",
        0,
    ),
    "no field, by its text": (
        RUN,
        "import typing\n@dataclasses.dataclass\nclass S(Engine):\n    run: 'typing.ClassVar[object]'\n",
        0,
    ),
    "what only the generated method takes": (
        RUN,
        "@dataclasses.dataclass\nclass S(Engine):\n    run: dataclasses.InitVar[object]\n",
        7,
    ),
    "what only looks like a class's": (
        RUN,
        "ClassVar = list\n@dataclasses.dataclass\nclass S(Engine):\n    run: ClassVar[object]\n",
        7,
    ),
    "an annotation in a subclass of a dataclass": (
        RUN,
        "@dataclasses.dataclass\nclass S(Engine): ...\nclass T(S):\n    run: object\n",
        0,
    ),
    "an annotation": (RUN, "class S(Engine):\n    run: object\n", 0),
    "what a frozen one has": ("Engine.__setattr__", "@dataclasses.dataclass(frozen=True)\nclass S(Engine): ...\n", 4),
    "what one has that may be frozen": (
        "Engine.__setattr__",
        "@dataclasses.dataclass(frozen=X)\nclass S(Engine): ...\n",
        4,
    ),
    "what one has whose options aren't seen": (
        "Engine.__lt__",
        "@dataclasses.dataclass(**X)\nclass S(Engine): ...\n",
        4,
    ),
    "what one has by another name": (
        "Engine.__setattr__",
        "frozen = dataclasses.dataclass(frozen=True)\n@frozen\nclass S(Engine): ...\n",
        4,
    ),
    "what one has by a function of the package": (
        "Engine.__setattr__",
        "from typing import dataclass_transform\n@dataclass_transform()\n"
        "def config(c): return dataclasses.dataclass(c, frozen=True)\n"
        "@config\nclass S(Engine): ...\n",
        4,
    ),
    "what one has by a partial": (
        "Engine.__setattr__",
        "import functools\nfrozen = functools.partial(dataclasses.dataclass, frozen=True)\n"
        "@frozen\nclass S(Engine): ...\n",
        4,
    ),
    "what one has by a function of its name": (
        "Engine.__setattr__",
        "dataclass = dataclasses.dataclass(frozen=True)\n@dataclass\nclass S(Engine): ...\n",
        4,
    ),
    "what one has by its configuration": (
        "Engine.__setattr__",
        "from pydantic.dataclasses import dataclass\n@dataclass(config={'frozen': True})\nclass S(Engine): ...\n",
        4,
    ),
    "what only a frozen one has, by name": (
        "Engine.__setattr__",
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass S(Engine): ...\n",
        0,
    ),
    "what only a frozen one has": ("Engine.__setattr__", "@dataclasses.dataclass\nclass S(Engine): ...\n", 0),
    "what an ordered one has": ("Engine.__lt__", "@dataclasses.dataclass(order=True)\nclass S(Engine): ...\n", 4),
    "what only an ordered one has": (
        "Engine.__lt__",
        "@dataclasses.dataclass(order=False, frozen=True)\nclass S(Engine): ...\n",
        0,
    ),
    "what one with a hash has": (
        "Engine.__hash__",
        "@dataclasses.dataclass(eq=False, unsafe_hash=True)\nclass S(Engine): ...\n",
        4,
    ),
    "what one with slots has": ("Engine.__getstate__", "@dataclasses.dataclass(slots=True)\nclass S(Engine): ...\n", 4),
}


@pytest.mark.parametrize("name", GENERATED)
def test_what_a_dataclass_has_of_its_own_is_an_override(world: World, name: str) -> None:
    target, text, expected = GENERATED[name]
    method = target.rpartition(".")[2]
    world.write(f"{world.package}/core.py", BASE)
    if method not in BASE:
        world.core("class Sub(Engine)", f"    def {method}(self, *args): ...\n\n\nclass Sub(Engine)")
    world.declare(world.entry(f"PKG.core:{target.rpartition(':')[2]}", id="a", replacement="OURS.patches:run"))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/other.py", f"{DATACLASS}{text}")
    assert world.verify() == expected


BARE = {
    "a dataclass": "import dataclasses as d\n@d.dataclass\nclass S(Engine):\n    SIZE: int\n",
    "its parameter": "import dataclasses as d\n@d.dataclass\nclass S(Engine):\n    SIZE: d.InitVar[int]\n",
    "below another": "import dataclasses as d\nclass A(Engine): ...\n@d.dataclass\nclass S(A):\n    SIZE: int\n",
    "a model": "from pydantic import BaseModel\nclass S(BaseModel, Engine):\n    SIZE: int\n",
}


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize("name", BARE)
def test_a_field_without_a_default_has_taken_over_what_its_bases_have(world: World, name: str) -> None:
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.package}/other.py", f"from .core import Engine\n{BARE[name]}")
    world.write(f"{world.ours}/patches.py", OURS)
    patches = world.patchset(world.entry(SIZE, kind="replace"))
    assert world.verify() == 7
    world.load("PKG.other")
    with pytest.raises(NotInEffect, match=r"a default argument or closure of .*\.other\.S\.__init__"):
        patches.apply(role="red", process="worker")
    patches = world.patchset(world.entry(SIZE, kind="replace", when="always"))
    assert world.verify() == 0
