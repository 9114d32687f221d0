"""Every kind of target, what a patched one looks like, and everything that is refused, with who is in the way."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
from typing import Any

import pytest

from afdpatch.registry import Conflict, NotInEffect, PatchError, Unpatchable, references
from tests.registry.conftest import World

ZOO = '''
import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple

NUMBER = 3
TABLE = {"a": 1}


def plain(x, y=2):
    """Plain."""
    return x + y


async def coroutine(x):
    return x


def generator(x):
    yield x
    return x + 1


async def async_generator(x):
    yield x


class Base:
    scale = 5

    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def klass(cls, x):
        return cls.__name__, x

    @property
    def prop(self):
        """Prop."""
        return self._p

    @prop.setter
    def prop(self, value):
        self._p = value

    @functools.cached_property
    def cached(self):
        return 7

    def __call__(self, x):
        return x

    def __getstate__(self):
        return {"_p": getattr(self, "_p", None)}


class Sub(Base):
    def method(self, x):
        return ("sub", super().method(x))


class Alone:
    def hello(self):
        return "hello"


class Deaf(functools.partial):
    pass


@functools.lru_cache
def remembered(x):
    return x


@dataclass
class Data:
    field: int = 1


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: int = 1


def made_by(cls):
    def make(x):
        return cls(x)
    return make
'''

OURS = """
import functools

NUMBER = 30
TABLE = {"a": 10}
TEXT = "3"
FIVE = 50

def wrap1(original):
    def ours(x):
        return ("ours", original(x))
    return ours

def plain(original):
    def plain(x, y=2):
        return ("ours", original(x, y))
    return plain

def coroutine(original):
    async def coroutine(x):
        return ("ours", await original(x))
    return coroutine

def generator(original):
    def generator(x):
        result = yield from original(x)
        return ("ours", result)
    return generator

def async_generator(original):
    async def async_generator(x):
        async for item in original(x):
            yield ("ours", item)
    return async_generator

def method(original):
    def method(self, x):
        return ("ours", original(self, x))
    return method

def klass(original):
    def klass(cls, x):
        return ("ours", original(cls, x))
    return klass

def prop(original):
    def prop(self):
        return ("ours", original(self))
    return prop

def getstate(original):
    def __getstate__(self):
        return original(self) | {"ours": True}
    return __getstate__

def hello(original):
    def hello(self):
        return "ours"
    return hello
"""


@pytest.fixture
def zoo(world: World) -> World:
    world.write(f"{world.package}/zoo.py", ZOO)
    world.write(f"{world.ours}/kinds.py", OURS)
    world.write(
        f"{world.ours}/classes.py",
        "from PKG.zoo import Alone\nclass Alone(Alone):\n    def hello(self): return 'ours'\nclass Other: ...\n",
    )
    return world


def entry(zoo: World, name: str, replacement: str | None = None, **keys: Any) -> dict[str, Any]:
    replacement = replacement or f"OURS.kinds:{name.rpartition('.')[2]}"
    return zoo.entry(f"PKG.zoo:{name}", replacement=replacement, **keys)


def collect(generator: Any) -> tuple[list[Any], Any]:
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as end:
            return items, end.value


async def acollect(generator: Any) -> list[Any]:
    return [item async for item in generator]


# name in zoo: (replacement, kind, what to do with the module, expected while it is in effect)
WORKS: dict[str, tuple[str | None, str, Any, Any]] = {
    "plain": (None, "wrap", lambda m: m.plain(1, y=4), ("ours", 5)),
    "coroutine": (None, "wrap", lambda m: asyncio.run(m.coroutine(1)), ("ours", 1)),
    "generator": (None, "wrap", lambda m: collect(m.generator(1)), ([1], ("ours", 2))),
    "async_generator": (None, "wrap", lambda m: asyncio.run(acollect(m.async_generator(1))), [("ours", 1)]),
    "Base.method": (None, "wrap", lambda m: m.Sub().method(1), ("sub", ("ours", 1))),
    "Base.static": (
        "OURS.kinds:wrap1",
        "wrap",
        lambda m: (m.Base.static(1), m.Sub().static(2)),
        (("ours", 1), ("ours", 2)),
    ),
    "Base.klass": (None, "wrap", lambda m: m.Sub.klass(1), ("ours", ("Sub", 1))),
    "Base.prop": (None, "wrap", lambda m: with_prop(m.Sub()).prop, ("ours", 9)),
    "Base.cached": ("OURS.kinds:prop", "wrap", lambda m: m.Sub().cached, ("ours", 7)),
    "Base.__call__": ("OURS.kinds:method", "wrap", lambda m: m.Sub()(1), ("ours", 1)),
    "Base.__getstate__": ("OURS.kinds:getstate", "wrap", lambda m: getattr(copy.copy(m.Base()), "ours", None), True),
    "Base.scale": ("OURS.kinds:FIVE", "replace", lambda m: (m.Base.scale, m.Sub().scale), (50, 50)),
    "NUMBER": (None, "replace", lambda m: m.NUMBER, 30),
    "TABLE": (None, "replace", lambda m: m.TABLE["a"], 10),
    "Alone": ("OURS.classes:Alone", "replace", lambda m: m.Alone().hello(), "ours"),
    "Alone.hello": (None, "wrap", lambda m: m.Alone().hello(), "ours"),
}


def with_prop(item: Any) -> Any:
    item.prop = 9
    return item


@pytest.mark.parametrize("first", ["import", "arm"])
@pytest.mark.parametrize("name", WORKS)
def test_every_kind_of_target_takes_effect_and_is_given_back_by_identity(zoo: World, name: str, first: str) -> None:
    replacement, kind, use, expected = WORKS[name]
    patches = zoo.patchset(entry(zoo, name, replacement, kind=kind, when="always"))
    owner: Any = None
    *outer, last = name.split(".")
    if first == "import":
        module = owner = zoo.load("PKG.zoo")
        for part in outer:
            owner = vars(owner)[part]
        before = vars(owner)[last]
    patches.arm()
    module = zoo.load("PKG.zoo")
    assert use(module) == expected
    if first == "import":
        assert type(vars(owner)[last]) is (type if kind == "replace" and isinstance(before, type) else type(before))
        assert patches.original(patches.manifest.entries[0].id) is not None
    patches.undo()
    assert use(module) != expected
    if first == "import":
        assert vars(owner)[last] is before


def test_what_is_patched_looks_as_before(zoo: World) -> None:
    names = ["plain", "coroutine", "generator", "async_generator", "Base.method", "Base.klass", "Base.prop"]
    patches = zoo.patchset(*(entry(zoo, name) for name in names))
    module = zoo.load("PKG.zoo")

    def look() -> list[Any]:
        functions = [module.plain, module.coroutine, module.generator, module.async_generator]
        functions += [module.Base.method, module.Base.klass, module.Sub().klass]
        seen = []
        for function in functions:
            seen += [inspect.signature(function), inspect.getfullargspec(function), inspect.getsource(function)]
            seen += [inspect.getdoc(function), inspect.getmodule(function), function.__name__, function.__qualname__]
            for ask in (
                inspect.isfunction,
                inspect.ismethod,
                inspect.iscoroutinefunction,
                inspect.isgeneratorfunction,
                inspect.isasyncgenfunction,
                callable,
            ):
                seen.append(ask(function))
        prop = vars(module.Base)["prop"]
        seen += [type(prop), prop.fset, prop.fdel, prop.__doc__, sorted(vars(module.Base))]
        seen += [pickle.dumps(module.plain), pickle.dumps(module.Base.klass), pickle.dumps(module.Base.method)]
        seen += [isinstance(module.Sub(), module.Base), module.Sub.__mro__, copy.deepcopy(module.plain) is module.plain]
        return seen

    before = look()
    patches.apply(role="red", process="worker")
    assert module.plain(1) == ("ours", 3)
    assert look() == before
    assert pickle.loads(pickle.dumps(module.plain)) is module.plain


# ---- refused -------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # name: (entry's keys, words)
    "lru_cache": ({"name": "remembered", "replacement": "OURS.kinds:wrap1"}, "cache_clear"),
    "dataclass field": ({"name": "Data.field", "replacement": "OURS.kinds:NUMBER", "kind": "replace"}, "a dataclass"),
    "enum member": ({"name": "Colour.RED", "replacement": "OURS.kinds:NUMBER", "kind": "replace"}, "an enumeration"),
    "named tuple field": ({"name": "Pair.one", "replacement": "OURS.kinds:NUMBER", "kind": "replace"}, "a named tuple"),
    "value of another type": ({"name": "NUMBER", "replacement": "OURS.kinds:TEXT", "kind": "replace"}, "another type"),
    "class that is no subclass": (
        {"name": "Alone", "replacement": "OURS.classes:Other", "kind": "replace"},
        "subclass",
    ),
    "class with a subclass": ({"name": "Base", "replacement": "OURS.sub:Base", "kind": "replace"}, ".zoo.Sub"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_patched_soundly_is_refused_with_the_reason(
    zoo: World, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, words = REFUSED[name]
    zoo.write(f"{zoo.ours}/sub.py", "from PKG.zoo import Base\nclass Base(Base): ...\n")
    patches = zoo.patchset(entry(zoo, **keys))
    # What the entry's own code is isn't vLLM's source, and isn't imported by verify.
    code = {"class with a subclass": 7, "value of another type": 0, "class that is no subclass": 0}.get(name, 2)
    assert zoo.verify() == code
    with pytest.raises((Unpatchable, NotInEffect)) as caught:
        patches.apply(role="red", process="worker")
    assert words in str(caught.value)
    assert caught.value.symbol is not None
    assert code in (0, caught.value.exit_code)
    assert code == 0 or words in capsys.readouterr().out


def test_a_class_with_instances_is_refused(zoo: World) -> None:
    patches = zoo.patchset(entry(zoo, "Alone", "OURS.classes:Alone", kind="replace"))
    alive = zoo.load("PKG.zoo").Alone()
    with pytest.raises(NotInEffect, match=r"1 instance\(s\)"):
        patches.apply(role="red", process="worker")
    del alive


def test_an_abstract_replacement_of_a_class_is_refused(zoo: World) -> None:
    body = "class Alone(Alone, abc.ABC):\n    @abc.abstractmethod\n    def more(self): ...\n"
    source = f"import abc\nfrom PKG.zoo import Alone\n{body}"
    zoo.write(f"{zoo.ours}/abstract.py", source)
    patches = zoo.patchset(entry(zoo, "Alone", "OURS.abstract:Alone", kind="replace"))
    with pytest.raises(Unpatchable, match="more"):
        patches.apply(role="red", process="worker")


@pytest.mark.parametrize("name", ["Alone", "NUMBER", "TABLE"])
def test_pin_refuses_to_wrap_what_is_no_function(zoo: World, name: str) -> None:
    zoo.declare(entry(zoo, name, "OURS.kinds:wrap1"))
    assert zoo.pin() == 2


# How somebody may hold zoo.plain, zoo.Base.method, zoo.Base.static or zoo.Base.prop: (target, code, who is named)
HOLDERS: dict[str, tuple[str, str, str]] = {
    "partial": ("plain", "import functools\nP = functools.partial(zoo.plain, 1)", "functools.partial, PKG.user.P"),
    "default argument": ("plain", "def use(f=zoo.plain): ...", "default argument or closure of PKG.user.use"),
    "keyword default": (
        "plain",
        "def use(*, f=zoo.plain): ...",
        "an attribute of PKG.user.use|closure of PKG.user.use",
    ),
    "closure": ("plain", "def outer(f):\n    return lambda: f\nuse = outer(zoo.plain)", "closure of PKG.user.outer"),
    "decorated": (
        "plain",
        "import functools\n@functools.wraps(zoo.plain)\ndef use(x, y): ...",
        "attribute of PKG.user.use",
    ),
    "dispatch table": ("plain", "T = {'plain': zoo.plain}", r"dict\['plain'\], PKG.user.T"),
    "nested table": ("plain", "T = {'all': [(zoo.plain, 1)]}", "PKG.user.T"),
    "list": ("plain", "T = [zoo.plain]", "list, PKG.user.T"),
    "set": ("plain", "T = {zoo.plain}", "set, PKG.user.T"),
    "functools cache": ("plain", "import functools\nC = functools.lru_cache(zoo.plain)", "functools cache, PKG.user.C"),
    "class attribute": ("plain", "class C:\n    f = staticmethod(zoo.plain)", "staticmethod, PKG.user.C.f"),
    "instance attribute": ("plain", "class C: ...\nc = C()\nc.f = zoo.plain", "PKG.user.c.f|an object of PKG.user.C"),
    "slot": (
        "plain",
        "class C:\n    __slots__ = ('f',)\nc = C()\nc.f = zoo.plain",
        "PKG.user.c.f|an object of PKG.user.C",
    ),
    "other name": ("plain", "other = zoo.plain", "PKG.user.other"),
    "bound method kept at init": (
        "Base.method",
        "class C(zoo.Base):\n    def __init__(self):\n        self._forward = self.method\nc = C()",
        "bound method, an attribute of an object of PKG.user.C",
    ),
    "alias in another class": ("Base.method", "class C:\n    alias = zoo.Base.method", "PKG.user.C.alias"),
    "alias in the same class": ("Base.method", "zoo.Base.again = zoo.Base.method", "PKG.zoo.Base.again"),
    "partialmethod": (
        "Base.method",
        "import functools\nclass C(zoo.Base):\n    m1 = functools.partialmethod(zoo.Base.method, 1)",
        "functools.partialmethod, PKG.user.C.m1",
    ),
    "static method by name": ("Base.static", "s = zoo.Base.static", "PKG.user.s"),
    "class method bound": ("Base.klass", "k = zoo.Base.klass", "bound method, PKG.user.k"),
    "property of a subclass": (
        "Base.prop",
        "class C(zoo.Base):\n    @zoo.Base.prop.deleter\n    def prop(self): ...",
        "property, PKG.user.C.prop",
    ),
}


ONLY_AT_RUN_TIME = ("closure", "bound method kept at init")
"""What source doesn't tell: whether what is called keeps its argument, and whether there are instances already."""


@pytest.mark.parametrize("inside", [True, False], ids=["of the package", "of others"])
@pytest.mark.parametrize("name", HOLDERS)
def test_who_holds_the_original_is_named_and_nothing_is_changed(zoo: World, name: str, inside: bool) -> None:
    target, code, named = HOLDERS[name]
    user = f"{zoo.package}/user.py" if inside else f"{zoo.package}_user.py"
    zoo.write(user, f"from PKG import zoo\n{code}\n")
    replacement = {"Base.static": "OURS.kinds:wrap1"}.get(target)
    patches = zoo.patchset(entry(zoo, target, replacement))
    seen = inside and name not in ONLY_AT_RUN_TIME
    assert zoo.verify("--output", str(zoo.site / "report"), "--format", "json") == (7 if seen else 0)
    report = json.loads((zoo.site / "report").read_text())["entries"][0]["findings"]
    module = zoo.load("PKG.zoo")
    holder = zoo.load("PKG.user" if inside else "PKG_user")
    before = dict(vars(module.Base)), dict(vars(module))
    with pytest.raises(NotInEffect) as caught:
        patches.apply(role="red", process="worker")
    import re

    expected = zoo.text(named) if inside else zoo.text(named).replace(f"{zoo.package}.user", f"{zoo.package}_user")
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert caught.value.exit_code == 7
    if seen:  # told alike without an import, and with the line
        assert (report[0]["message"], report[0]["found"]) == (
            str(caught.value).split(": ")[2].rpartition(" (")[0],
            caught.value.found,
        )
        assert report[0]["file"] == f"{zoo.package}/user.py" and report[0]["line"] > 1
    assert (dict(vars(module.Base)), dict(vars(module))) == before
    del holder


def test_without_those_holders_the_same_targets_are_patched(zoo: World) -> None:
    names = {
        "plain": None,
        "Base.method": None,
        "Base.static": "OURS.kinds:wrap1",
        "Base.klass": None,
        "Base.prop": None,
    }
    patches = zoo.patchset(*(entry(zoo, name, replacement) for name, replacement in names.items()))
    zoo.load("PKG.zoo")
    patches.apply(role="red", process="worker")


def test_a_value_taken_over_by_name_is_rebound_and_one_taken_over_at_import_is_refused(zoo: World) -> None:
    zoo.write(f"{zoo.package}/user.py", "from .zoo import NUMBER as number\n\nTHREE = 3\n")
    patches = zoo.patchset(entry(zoo, "NUMBER", kind="replace", holders=["PKG.user"]))
    user = zoo.load("PKG.user")
    patches.apply(role="red", process="worker")
    assert (user.number, user.THREE) == (30, 3)
    patches.undo()
    assert (user.number, user.THREE) == (3, 3)
    zoo.write(f"{zoo.package}/more.py", "from .zoo import NUMBER\n")
    zoo.load("PKG.more")
    with pytest.raises(NotInEffect, match=rf"{zoo.package}\.more\.NUMBER"):
        patches.apply(role="red", process="worker")


@pytest.mark.parametrize(
    "code", ["def late(x=NUMBER): ...", "class Late:\n    twice = NUMBER * 2", "@print\nclass L: a = NUMBER"]
)
def test_a_value_that_is_used_while_modules_are_imported_is_refused_with_the_line(zoo: World, code: str) -> None:
    path = zoo.site / zoo.package / "zoo.py"
    path.write_text(path.read_text() + "\n\n" + code + "\n")
    patches = zoo.patchset(entry(zoo, "NUMBER", kind="replace"))
    with pytest.raises(NotInEffect, match=r"zoo\.py:\d+"):
        patches.apply(role="red", process="worker")


def test_containers_that_only_a_running_function_holds_do_not_count(zoo: World) -> None:
    patches = zoo.patchset(entry(zoo, "plain"))
    local = {"f": [zoo.load("PKG.zoo").plain]}
    patches.apply(role="red", process="worker")
    assert local["f"][0] is patches.original("core.plain")


def test_a_reload_loses_the_patch_and_says_so(zoo: World) -> None:
    import importlib

    patches = zoo.patchset(entry(zoo, "plain"))
    patches.apply(role="red", process="worker")
    importlib.reload(zoo.load("PKG.zoo"))
    with pytest.raises(NotInEffect, match="reloads"):
        patches.require()
    patches.undo()
    assert zoo.load("PKG.zoo").plain(1) == 3
    patches.apply(role="red", process="worker")
    assert zoo.load("PKG.zoo").plain(1) == ("ours", 3)


def test_a_replacement_of_another_call_kind_is_refused(zoo: World) -> None:
    for name in ("coroutine", "generator", "async_generator"):
        patches = zoo.patchset(entry(zoo, name, "OURS.kinds:wrap1"))
        with pytest.raises(PatchError, match="another kind"):
            patches.apply(role="red", process="worker")
        patches.undo()


def test_one_object_for_two_targets_is_refused(zoo: World) -> None:
    zoo.write(f"{zoo.package}/zoo.py", ZOO + "\n\nTABLE_TOO = {'a': 2}\n")
    one = entry(zoo, "TABLE", kind="replace")
    patches = zoo.patchset(one, entry(zoo, "TABLE_TOO", "OURS.kinds:TABLE", kind="replace"))
    table = zoo.load("PKG.zoo").TABLE
    with pytest.raises(Conflict, match="stands in another target"):
        patches.apply(role="red", process="worker")
    assert zoo.load("PKG.zoo").TABLE is table


def test_a_search_that_comes_to_its_limits_refuses_and_says_so(zoo: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = zoo.load("PKG.zoo").plain
    for _ in range(references.DEPTH + 1):
        deep = [deep]
    keeper = zoo.load("OURS")
    zoo.write(f"{zoo.package}_user.py", "")
    other = zoo.load("PKG_user")
    other.DEEP = deep
    patches = zoo.patchset(entry(zoo, "plain"))
    with pytest.raises(NotInEffect, match=f"the search ends after {references.DEPTH} containers"):
        patches.apply(role="red", process="worker")
    patches.undo()
    # Many containers that nothing names come before the one that is named.
    other.DEEP = None
    del deep
    plain = zoo.load("PKG.zoo").plain
    keeper.many = [[plain] for _ in range(5)]
    monkeypatch.setattr(references, "CLIMBS", 4)
    with pytest.raises(NotInEffect, match="the search ends after 4 objects"):
        patches.apply(role="red", process="worker")
    patches.undo()
    keeper.many = None
    del plain
    patches.apply(role="red", process="worker")
