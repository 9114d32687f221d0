"""Who holds an original, found by identity; and by source, where that shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afdpatch.registry import NotInEffect, references
from tests.registry.conftest import World
from tests.registry.test_kinds import entry

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


# How somebody may hold the class zoo.Alone: (code, who is named)
KEPT_CLASS: dict[str, tuple[str, str]] = {
    "other name": ("other = zoo.Alone", r"PKG_user\.other"),
    "table": ("T = {'alone': zoo.Alone}", r"dict\['alone'\], PKG_user\.T"),
    "table by class": ("T = {zoo.Alone: 1}", r"dict, PKG_user\.T"),
    "default argument": ("def use(c=zoo.Alone): ...", "closure of PKG_user.use"),
    "closure": ("def outer(c):\n    return lambda: c()\nuse = outer(zoo.Alone)", "closure of PKG_user.outer"),
    "partial": ("import functools\nuse = functools.partial(zoo.Alone)", "functools.partial, PKG_user.use"),
    "class attribute": ("class C:\n    made = zoo.Alone", "PKG_user.C.made"),
    "instance attribute": ("class C: ...\nc = C()\nc.made = zoo.Alone", "an object of PKG_user.C"),
    "a field's default": (
        "import dataclasses as d\n@d.dataclass\nclass D:\n    made: type = d.field(default_factory=zoo.Alone)\n"
        "del D.__init__",
        "an object of dataclasses.Field",
    ),
}


@pytest.mark.parametrize("name", KEPT_CLASS)
def test_who_holds_a_class_that_is_replaced_is_named(zoo: World, name: str) -> None:
    code, named = KEPT_CLASS[name]
    zoo.write(f"{zoo.package}_user.py", f"from PKG import zoo\n{code}\n")
    patches = zoo.patchset(entry(zoo, "Alone", "OURS.classes:Alone", kind="replace"))
    module, user = zoo.load("PKG.zoo"), zoo.load("PKG_user")
    before = module.Alone
    with pytest.raises(NotInEffect, match=zoo.text(named)):
        patches.apply(role="red", process="worker")
    assert module.Alone is before
    del user


@pytest.mark.parametrize("module", ["dataclasses", "pydantic.dataclasses"])
def test_what_a_dataclass_says_of_a_class_s_table_does_not_count(world: World, module: str) -> None:
    source = f"""
    import {module} as d
    from typing import ClassVar
    @d.dataclass
    class C:
        TABLE: ClassVar[dict] = {{}}
    """
    world.write(f"{world.package}/core.py", source)
    world.write(f"{world.ours}/patches.py", "TABLE = {1: 1}\n")
    patches = world.patchset(world.entry("PKG.core:C.TABLE", kind="replace"))
    assert world.verify() == 0
    core = world.load("PKG.core")
    patches.apply(role="red", process="worker")
    assert core.C().TABLE == {1: 1}
    patches.undo()
    assert core.C().TABLE == {}


def test_a_class_that_a_decorator_takes_into_a_table_is_held(world: World) -> None:
    source = "TABLE = {}\ndef register(c):\n    TABLE[c.__name__] = c\n    return c\n@register\nclass Alone: ...\n"
    world.write(f"{world.package}/core.py", source)
    world.write(f"{world.ours}/patches.py", "from PKG.core import Alone\nclass Alone(Alone): ...\n")
    patches = world.patchset(world.entry("PKG.core:Alone", kind="replace"))
    with pytest.raises(NotInEffect, match=r"dict\['Alone'\], target_\d+\.core\.TABLE"):
        patches.apply(role="red", process="worker")


def test_what_a_class_is_made_of_and_what_only_says_its_name_does_not_count(world: World) -> None:
    source = """
    import abc, dataclasses, typing
    T = typing.TypeVar("T")
    class Root(abc.ABC, typing.Generic[T]):
        def __init__(self): self.kept = 1
    class Alone(Root[int]):
        __slots__ = ("more",)
        def __init__(self):
            super().__init__()
            self.inner = lambda: __class__
        @property
        def prop(self): return super().__repr__()
        @classmethod
        def made(cls: "typing.Type[Alone]"): return cls()
    def use(one: Alone, two: typing.Optional[Alone] = None, *, more: list[Alone] = ()) -> Alone | None: ...
    @dataclasses.dataclass
    class Data:
        one: Alone
        two: typing.Optional[Alone] = None
    number: Alone
    """
    world.write(f"{world.package}/core.py", source)
    world.write(f"{world.ours}/patches.py", "from PKG.core import Alone\nclass Alone(Alone): ...\n")
    patches = world.patchset(world.entry("PKG.core:Alone", kind="replace"))
    core = world.load("PKG.core")
    assert core.use.__annotations__ and core.Data.__init__.__annotations__ and issubclass(core.Alone, core.Root)
    before = core.Alone
    patches.apply(role="red", process="worker")
    assert core.Alone is world.load("OURS.patches").Alone
    patches.undo()
    assert core.Alone is before


@pytest.mark.parametrize(
    "code",
    [
        "T = weakref.WeakValueDictionary(f=zoo.plain)",
        "T = weakref.WeakSet([zoo.plain])",
        "T = weakref.ref(zoo.plain)",
        "T = [weakref.proxy(zoo.plain)]",
        "b = zoo.Base()\nT = weakref.WeakMethod(b.method)",
        "def use(f=weakref.ref(zoo.plain)): ...",
    ],
)
def test_who_holds_a_weak_reference_is_named_since_ours_keeps_the_original_alive(zoo: World, code: str) -> None:
    target = "Base.method" if "Method" in code else "plain"
    zoo.write(f"{zoo.package}_user.py", f"import weakref\nfrom PKG import zoo\n{code}\n")
    patches = zoo.patchset(entry(zoo, target))
    user = zoo.load("PKG_user")
    with pytest.raises(
        NotInEffect,
        match="weak reference, .*(PKG_user|WeakValueDictionary|WeakSet|WeakMethod)".replace("PKG", zoo.package),
    ):
        patches.apply(role="red", process="worker")
    if hasattr(user, "T"):
        del user.T
        patches.undo()
        patches.apply(role="red", process="worker")


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
