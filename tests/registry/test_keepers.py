"""Who keeps an original, read from source: `verify` refuses it without an import, and `apply` alike."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from afdpatch.registry import Lock, NotInEffect, SourceTree, lock_path
from afdpatch.registry.keepers import keepers_of
from tests.registry.conftest import World

# What stands in PKG.core after `free` and `Engine`: (code, kind and name of the keeper, without the package)
KEEPS = {
    "default": ("def use(f=free): ...", ("default", "a default argument or closure of core.use")),
    "keyword default": ("def use(*, f=free): ...", ("default", "a default argument or closure of core.use")),
    "default of a lambda": ("use = lambda f=free: f", ("default", "a default argument or closure of core.use")),
    "default of a method": (
        "class C:\n    def use(self, f=free): ...",
        ("default", "a default argument or closure of core.C.use"),
    ),
    "name": ("other = free", ("name", "core.other")),
    "annotated name": ("other: object = free", ("name", "core.other")),
    "names": ("a, b = free, 1", ("name", "core.a")),
    "chained": ("a = b = free", ("name", "core.a")),
    "either": ("other = LIMIT or free", ("name", "core.other")),
    "table": ("T = {'x': free}", ("container", "dict['x'], core.T")),
    "nested": ("T = {'x': [(1, free)]}", ("container", "dict['x'], list, tuple, core.T")),
    "key": ("T = {free: 1}", ("container", "dict, core.T")),
    "set": ("T = {free}", ("container", "set, core.T")),
    "comprehension": ("T = [free for _ in range(2)]", ("container", "list, core.T")),
    "table filled later": ("T = {}\nT['x'] = free", ("container", "T['x'] set in core")),
    "added to a list": ("T = []\nT += [free]", ("container", "list, core.T")),
    "partial": ("import functools\nP = functools.partial(free, 1)", ("wrapper", "functools.partial, core.P")),
    "cache": ("import functools\nP = functools.lru_cache(free)", ("wrapper", "functools cache, core.P")),
    "wraps": ("import functools\n@functools.wraps(free)\ndef use(): ...", ("wrapper", "an attribute of core.use")),
    "class attribute": ("class C:\n    f = staticmethod(free)", ("wrapper", "staticmethod, core.C.f")),
    "in a class that may have its own": (
        "class C:\n    if LIMIT > 5:\n        free = 1\n    x = free",
        ("name", "core.C.x"),
    ),
    "in a class before its own": ("class C:\n    x = free\n    free = 1", ("name", "core.C.x")),
    "one of a condition": ("x = free if LIMIT else 1", ("name", "core.x")),
    "under if": ("if LIMIT:\n    other = free\nelse:\n    pass", ("name", "core.other")),
    "under try": ("try:\n    other = free\nexcept ValueError:\n    pass", ("name", "core.other")),
    "under with and for": ("for i in (1,):\n    other = free", ("name", "core.other")),
    "set on a class": ("Engine.extra = free", ("attribute", "core.Engine.extra")),
    "alias of a method": ("class C:\n    again = Engine.run", ("name", "core.C.again")),
}
KEEPS_NOT = {
    "call": "x = free(1)",
    "use in a function": "def use():\n    return [free]",
    "use in a lambda": "use = lambda: free",
    "another's name": "class C:\n    def free(self): ...\nx = C().free",
    "comparison": "x = helper is free",
    "attribute of it": "x = free.__name__",
    "condition": "x = 1 if free else 2",
    "negation": "x = not free",
    "text": "x = f'{free}'",
    "a class's own name": "class C:\n    free = 1\n    x = free\n    y = [free]",
    "a class's own method": "class C:\n    def free(self): ...\n    x = property(free)",
    "for checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    other = free",
    "annotation": "def use(f: 'free' = None) -> None: ...",
    "an exception's name in a class": "class C:\n    try: ...\n    except ValueError as free: ...",
}


def keep(world: World, code: str) -> None:
    path = world.site / world.package / "core.py"
    path.write_text(path.read_text() + "\n\n" + code + "\n")


def target(code: str) -> str:
    return "PKG.core:Engine.run" if "Engine.run" in code else "PKG.core:free"


@pytest.mark.parametrize("when", ["always", "role"])
@pytest.mark.parametrize("name", KEEPS)
def test_what_the_target_s_own_module_keeps_is_refused_by_verify_and_at_run_time_alike(
    world: World, capsys: pytest.CaptureFixture[str], name: str, when: str
) -> None:
    code, (kind, where) = KEEPS[name]
    keep(world, code)
    patches = world.patchset(world.entry(target(code), when=when))
    (keeper,) = Lock.read(lock_path(world.manifest, "1.0")).keepers[world.text(target(code))][:1]
    where = where.replace("core.", f"{world.package}.core.").replace("in core", f"in {world.package}.core")
    assert (keeper.kind, keeper.where) == (kind, where)
    capsys.readouterr()
    assert world.verify("--format", "json") == 7
    (finding,) = json.loads(capsys.readouterr().out)["entries"][0]["findings"]
    assert finding["verdict"] == "held" and where in finding["found"]
    assert world.package not in sys.modules
    with pytest.raises(NotInEffect) as caught:
        patches.arm()
        if when == "role":
            patches.apply(role="red", process="worker")
        world.load("PKG.core")
    assert (caught.value.exit_code, caught.value.found) == (7, finding["found"])


@pytest.mark.parametrize("name", KEEPS_NOT)
def test_what_only_uses_it_keeps_nothing(world: World, name: str) -> None:
    keep(world, KEEPS_NOT[name])
    world.declare(world.entry())
    assert world.pin() == 0
    assert world.verify() == 0
    assert not Lock.read(lock_path(world.manifest, "1.0")).keepers


USERS = {
    "by name": "from .core import free\nother = free",
    "renamed": "from .core import free as f\nother = f",
    "by module": "from . import core\nother = core.free",
    "by renamed module": "from . import core as c\nother = c.free",
    "by full name": "import PKG.core\nother = PKG.core.free",
    "by full renamed name": "import PKG.core as c\nother = c.free",
    "by another module": "from .again import free\nother = free",
    "by star": "from .core import *\nother = free",
    "by a module that may have it": "from . import either\nother = either.free",
    "after another": "free = None\nif __name__:\n    from .core import free\nother = free",
}


@pytest.mark.parametrize("name", USERS)
def test_another_module_is_in_the_way_of_a_role_s_entry_only(world: World, name: str) -> None:
    world.write(f"{world.package}/again.py", "from .core import free\n")
    world.write(
        f"{world.package}/either.py", "try:\n    from .core import free\nexcept ImportError:\n    free = None\n"
    )
    world.write(f"{world.package}/user.py", USERS[name])
    holders = [
        "PKG.again",
        "PKG.either",
        *(["PKG.user"] if "free as" in USERS[name] or "import free" in USERS[name] else []),
    ]
    holders += ["PKG.user"] if "*" in USERS[name] else []
    world.declare(world.entry(holders=[] if name == "by another module" else holders))
    assert world.pin() == 0
    assert world.verify() == 7
    found = Lock.read(lock_path(world.manifest, "1.0")).keepers[f"{world.package}.core:free"]
    assert f"{world.package}.user.other" in [keeper.where for keeper in found if keeper.kind == "name"]
    patches = world.patchset(world.entry(when="always"))
    assert world.verify() == 0
    patches.arm()
    assert world.load("PKG.user").other(1) == ("ours", 8)


# By what PKG.names has the class Engine: (source, name)
NAMES = {
    "a name that is bound to itself": ("from .core import Engine as E\nE = E", "E"),
    "a name or something else": ("from .core import Engine as E\nE = E or None", "E"),
    "names that change places": ("from .core import Engine as E, free as F\nE, F = F, E", "F"),
    "a name that was another's": ("from .core import free as E, Engine\nF = Engine\nE = F\nF = None", "E"),
    "a class's name": ("from .core import Engine\nclass K:\n    E = Engine", "K.E"),
    "a class's name by one of its own": ("from .core import Engine\nclass K:\n    F = Engine\n    E = F", "K.E"),
    "a class's name that is bound to itself": ("from .core import Engine as E\nclass K:\n    E = E", "K.E"),
    "a class's import": ("class K:\n    from .core import Engine as E", "K.E"),
    "a base's name": ("from .core import Engine\nclass B:\n    E = Engine\nclass K(B): ...", "K.E"),
    "a star's of a star": ("from .core import Engine as E\nfrom .back import *", "E"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_followed_by_what_another_module_calls_it(world: World, name: str) -> None:
    source, way = NAMES[name]
    world.write(f"{world.package}/names.py", source)
    world.write(f"{world.package}/back.py", "from .names import *\n")
    world.write(f"{world.package}/user.py", f"from . import names\nother = names.{way}.run\n")
    found = keepers_of(SourceTree.at(world.package, world.site), f"{world.package}.core:Engine.run", "function")
    assert ("name", f"{world.package}.user.other") in [(keeper.kind, keeper.where) for keeper in found]
    assert world.load("PKG.user").other is world.load("PKG.core").Engine.run


# What happens to the name of a subclass after its method was kept.
LATER = {
    "nothing": "",
    "deleted": "del Sub",
    "another": "Sub = None",
    "decorated by hand": "Sub = staticmethod(Sub)",
    "imported": "from .core import helper as Sub",
}


@pytest.mark.parametrize("name", LATER)
def test_a_subclass_is_what_it_was_where_its_method_is_kept_or_assigned(world: World, name: str) -> None:
    target = f"{world.package}.core:Engine.run"
    source = "from .core import Engine\nclass Sub(Engine): ...\n{}\n" + LATER[name]
    world.write(f"{world.package}/assigns.py", source.format("Sub.run = None"))
    world.write(f"{world.package}/keeps.py", source.format("other = Sub.run"))
    found = keepers_of(SourceTree.at(world.package, world.site), target, "function")
    assert [(keeper.kind, keeper.module.rpartition(".")[2]) for keeper in found] == [
        ("override", "assigns"),
        ("name", "keeps"),
    ]
    assert world.load("PKG.keeps").other is world.load("PKG.core").Engine.run


def test_a_class_s_name_that_is_something_else_in_the_end_is_not_followed(world: World) -> None:
    source = "from .core import Engine\nclass Other:\n    run = 1\nclass K:\n    E = Engine\n    E = Other\n"
    world.write(f"{world.package}/names.py", source)
    world.write(f"{world.package}/user.py", "from . import names\nother = names.K.E.run\n")
    assert not keepers_of(SourceTree.at(world.package, world.site), f"{world.package}.core:Engine.run", "function")


def test_an_unlisted_holder_is_in_the_way_of_a_role_s_entry(world: World) -> None:
    world.write(f"{world.package}/user.py", "\nfrom .core import free as f\n")
    patches = world.patchset(world.entry())
    assert world.verify() == 7
    with pytest.raises(NotInEffect, match=rf"{world.package}\.user\.f \({world.package}/user\.py:2\)"):
        patches.apply(role="red", process="worker")
    world.declare(world.entry(holders=["PKG.user"]))
    assert (world.pin(), world.verify()) == (0, 0)


def drifted(world: World, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert world.verify("--format", "json") == 4
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return str([finding["found"] for entry in report["entries"] for finding in entry["findings"]])


def test_an_override_or_an_argument_that_was_pinned_is_known_and_a_new_one_is_drift(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sub = "from .core import Engine as Base\nclass Sub(Base): ...\nclass Deep(Sub):\n    def run(self, x): ...\n"
    world.write(f"{world.package}/sub.py", sub)
    world.write(f"{world.package}/user.py", "from . import core\ncore.helper(core.free)\n")
    world.declare(world.entry(), world.entry("PKG.core:Engine.run"))
    assert (world.pin(), world.verify()) == (0, 0)
    tree = SourceTree.at(world.package, world.site)
    found = keepers_of(tree, f"{world.package}.core:Engine.run", "function")
    where = f"{world.package}.sub.Deep.run, which doesn't call what it overrides,"
    assert [(keeper.kind, keeper.where) for keeper in found] == [("override", where)]
    world.write(f"{world.package}/sub.py", "# moved\n\n\n" + sub)
    assert world.verify() == 0
    world.write(f"{world.package}/more.py", "from .sub import Sub\nclass More(Sub):\n    run = None\n")
    assert f"{world.package}.more.More.run, which doesn't call what it overrides, overrides" in drifted(world, capsys)
    (world.site / world.package / "more.py").unlink()
    world.write(f"{world.package}/more.py", "from . import core\nprint(core.free)\n")
    assert "an argument of print" in drifted(world, capsys)


def test_a_class_s_subclasses_are_named_and_those_of_other_modules_come_after_an_always_entry(world: World) -> None:
    world.write(f"{world.ours}/sub.py", "from PKG.core import Engine\nclass Engine(Engine): ...\n")
    world.write(f"{world.package}/user.py", "from .core import Engine\nclass Sub(Engine): ...\n")
    keys: dict[str, Any] = {"kind": "replace", "replacement": "OURS.sub:Engine", "holders": ["PKG.user"]}
    patches = world.patchset(world.entry("PKG.core:Engine", **keys))
    assert world.verify() == 7
    with pytest.raises(NotInEffect, match=rf"{world.package}\.user\.Sub"):
        patches.apply(role="red", process="worker")
    patches = world.patchset(world.entry("PKG.core:Engine", when="always", **keys))
    assert world.verify() == 0
    keep(world, "class Near(Engine): ...")
    assert (world.pin(), world.verify()) == (0, 7)


D = "from dataclasses import InitVar, dataclass\nfrom typing import ClassVar\n"
CLASS_VARIABLE = "@dataclass\nclass C:\n    f: {} = 1"
# (source of PKG.zoo, target, words)
FORMS = {
    "cache": ("import functools\n@functools.cache\ndef f(x): ...", "f", "cache_clear"),
    "renamed cache": ("from functools import lru_cache\n@lru_cache(maxsize=2)\ndef f(x): ...", "f", "cache_clear"),
    "a partial's": (
        "import functools as f\nmemo = f.partial(f.lru_cache, maxsize=2)\n@memo()\ndef f(x): ...",
        "f",
        "cache_clear",
    ),
    "single dispatch": (
        "import functools\nclass C:\n    @functools.singledispatchmethod\n    def f(self, x): ...",
        "C.f",
        "in a table",
    ),
    "dataclass": ("from dataclasses import dataclass\n@dataclass\nclass C:\n    f: int = 1", "C.f", "a dataclass"),
    "derived dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass B:\n    f: int = 1\nclass C(B): ...",
        "C.f",
        "a dataclass",
    ),
    "the package's own": (
        "import dataclasses\nfrom typing_extensions import dataclass_transform\n@dataclass_transform()\n"
        "def config(c):\n    return dataclasses.dataclass(c)\n@config\nclass C:\n    f: int = 1",
        "C.f",
        "a dataclass",
    ),
    "model": ("from pydantic import BaseModel\nclass C(BaseModel):\n    f: int = 1", "C.f", "a pydantic model"),
    "enumeration": ("import enum\nclass C(enum.IntEnum):\n    f = 1", "C.f", "an enumeration"),
    "named tuple": ("from typing import NamedTuple\nclass C(NamedTuple):\n    f: int = 1", "C.f", "a named tuple"),
    "for the generated __init__": (f"{D}@dataclass\nclass C:\n    f: InitVar[int] = 1", "C.f", "a dataclass"),
    "an inherited field": (f"{D}@dataclass\nclass B:\n    f: int = 1\nclass C(B):\n    f = 1", "C.f", "a dataclass"),
    "one that is named a class's in a text of a text": (
        "from __future__ import annotations\n" + D + CLASS_VARIABLE.format("'ClassVar[int]'"),
        "C.f",
        "a dataclass",
    ),
    "a text in brackets": (D + CLASS_VARIABLE.format("'(ClassVar[int])'"), "C.f", "a dataclass"),
    "a class's by a name for checkers": (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import typing as t\n" + D + CLASS_VARIABLE.format("t.ClassVar[int]"),
        "C.f",
        "a dataclass",
    ),
    "an enumeration's, whatever its annotation": (
        "import enum\nfrom typing import ClassVar\nclass C(enum.Enum):\n    f: ClassVar[int] = 1",
        "C.f",
        "an enumeration",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_cannot_be_patched_is_refused_by_its_source(
    world: World, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, qualname, words = FORMS[name]
    world.write(f"{world.package}/zoo.py", source)
    kind = "wrap" if words in ("cache_clear", "in a table") else "replace"
    world.declare(world.entry(f"PKG.zoo:{qualname}", kind=kind, replacement="OURS.patches:ready"))
    assert world.pin() == 0
    capsys.readouterr()
    assert world.verify() == 2
    out = capsys.readouterr().out
    assert "unpatchable" in out and words in " ".join(out.split())


# What stands in a class of PKG.zoo that has fields, and is none of them.
NO_FIELDS = {
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int = 1\n    f = 1",
    "subclass of a dataclass": "from dataclasses import dataclass\n@dataclass\nclass B: ...\nclass C(B):\n    f = 1",
    "class in a dataclass": "import dataclasses as d\n@d.dataclass\nclass C:\n    class D:\n        f: int\n    f = 1",
    "named tuple": "from typing import NamedTuple\nclass C(NamedTuple):\n    x: int = 1\n    f = 1",
    "a class's": D + CLASS_VARIABLE.format("ClassVar[int]"),
    "a class's, by its text": D + CLASS_VARIABLE.format("'ClassVar[int]'"),
    "a class's, by its module": "import typing as t\n" + D + CLASS_VARIABLE.format("t.ClassVar"),
    "a class's, by another name": "from typing import ClassVar as CV\n" + D + CLASS_VARIABLE.format("CV[int]"),
    "a class's, all annotations texts": "from __future__ import annotations\nimport typing\n"
    + D
    + CLASS_VARIABLE.format("typing.ClassVar[int]"),
    "a model's class's": "from typing import ClassVar\nfrom pydantic import BaseModel\n"
    "class C(BaseModel):\n    f: ClassVar[int] = 1",
    "annotated in a subclass of a dataclass": D + "@dataclass\nclass B:\n    x: int = 1\nclass C(B):\n    f: int = 1",
    "annotated in a base of a dataclass": D + "class C:\n    f: int = 1\n@dataclass\nclass B(C):\n    x: int = 1",
    "annotated in a subclass of a named tuple": "from typing import NamedTuple\n"
    "class B(NamedTuple):\n    x: int = 1\nclass C(B):\n    f: int = 1",
}


@pytest.mark.parametrize("name", NO_FIELDS)
def test_a_value_of_a_class_with_fields_that_is_none_is_replaced(world: World, name: str) -> None:
    world.write(f"{world.package}/zoo.py", NO_FIELDS[name])
    world.write(f"{world.ours}/patches.py", "number = 2\n")
    patches = world.patchset(world.entry("PKG.zoo:C.f", kind="replace", replacement="OURS.patches:number"))
    assert world.verify() == 0
    with patches.applied(role="red", process="worker"):
        assert world.load("PKG.zoo").C.f == 2
