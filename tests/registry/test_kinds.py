"""Every kind of target, what a patched one looks like, and everything that is refused, with who is in the way."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from typing import Any

import pytest

from afdpatch.registry import Conflict, NotInEffect, PatchError, Unpatchable
from tests.registry.conftest import World
from tests.registry.zoo import ZOO


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


CACHES = {
    "renamed by its import": "from functools import cache as memo",
    "a name of the module": "import functools\nmemo = functools.lru_cache(maxsize=None)",
    "a name of another module": "from .other import memo",
    "one of two": "try:\n    from functools import cache as memo\nexcept ImportError:\n    memo = None",
}


@pytest.mark.parametrize("code", CACHES.values(), ids=CACHES)
def test_a_cache_by_another_name_is_refused_by_source_too(world: World, code: str) -> None:
    world.write(f"{world.package}/other.py", "import functools\nmemo = functools.cache\n")
    world.write(f"{world.package}/core.py", f"{code}\n@memo\ndef free(x, scale=2): ...\n")
    patches = world.patchset(world.entry())
    assert world.verify() == 2
    with pytest.raises(Unpatchable, match="cache_clear"):
        patches.apply(role="red", process="worker")


def test_a_decorator_of_the_package_that_is_named_like_a_cache_is_none(world: World) -> None:
    inner = "    @functools.wraps(f)\n    def g(*a, **k): return f(*a, **k)\n    return g\n"
    source = f"import functools\ndef cache(f):\n{inner}"
    world.write(f"{world.package}/core.py", f"{source}@cache\ndef free(x, scale=2): return x\n")
    patches = world.patchset(world.entry())
    assert world.verify() == 0
    patches.apply(role="red", process="worker")
    assert world.load("PKG.core").free(1) == ("ours", 1)


def test_a_private_method_is_patched_under_the_name_that_python_gives_it(world: World) -> None:
    source = (
        "class _Engine:\n    def __run(self, x, *, twice=False): return x\n    def use(self): return self.__run(1)\n"
    )
    world.write(f"{world.package}/core.py", f"{source}class Sub(_Engine): ...\n")
    entries = [
        world.entry(f"PKG.core:{owner}.__run", id=f"core.{owner.strip('_').lower()}", replacement="OURS.patches:run")
        for owner in ("_Engine", "Sub")
    ]
    for one, uses in zip(entries, ((("ours", 1), ("ours", 1)), (1, ("ours", 1))), strict=True):
        patches = world.patchset(one)
        assert world.verify() == 0
        core = world.load("PKG.core")
        before = dict(vars(core._Engine)), dict(vars(core.Sub))
        patches.apply(role="red", process="worker")
        assert (core._Engine().use(), core.Sub().use()) == uses
        patches.undo()
        assert (dict(vars(core._Engine)), dict(vars(core.Sub))) == before


@pytest.mark.parametrize("code", ["LIMIT = 3\ntry:\n    LIMIT = 4\nexcept ValueError: ...", "LIMIT = 3\nLIMIT += 1"])
def test_a_value_of_two_statements_is_what_the_module_made_of_them(world: World, code: str) -> None:
    world.write(f"{world.package}/core.py", f"{code}\n")
    world.write(f"{world.ours}/patches.py", "LIMIT = 99\n")
    patches = world.patchset(world.entry("PKG.core:LIMIT", kind="replace"))
    assert world.verify() == 0
    patches.apply(role="red", process="worker")
    assert world.load("PKG.core").LIMIT == 99
    patches.undo()
    assert world.load("PKG.core").LIMIT == 4
