from __future__ import annotations

import time
from pathlib import Path

import pytest

from afdpatch.registry import TargetDrifted
from afdpatch.registry.overrides import subclasses
from afdpatch.registry.source import SourceTree, SymbolAbsent, SymbolMoved
from tests.registry.conftest import World


def tree_of(world: World, **files: str) -> SourceTree:
    for name, source in files.items():
        world.write(f"{world.package}/{name}.py", source)
    return SourceTree.at(world.package, world.site)


@pytest.mark.parametrize(
    ("name", "kind", "line_of"),
    [
        ("free", "function", "def free"),
        ("LIMIT", "value", "LIMIT ="),
        ("Engine", "class", "class Engine"),
        ("Engine.run", "function", "def run"),
        ("Engine.make", "staticmethod", "def make"),
        ("Engine.name", "classmethod", "def name"),
    ],
)
def test_a_symbol_is_found_with_its_kind_and_line(world: World, name: str, kind: str, line_of: str) -> None:
    symbol = tree_of(world).resolve(f"{world.package}.core:{name}")
    assert symbol.kind == kind
    assert symbol.file == f"{world.package}/core.py"
    lines = (world.site / symbol.file).read_text(encoding="utf-8").splitlines()
    assert line_of in lines[symbol.line - 1]


def test_if_try_and_with_blocks_are_entered(world: World) -> None:
    source = """
    if X:
        try:
            import y
        except ImportError:
            def f(): return 1
        else:
            with z:
                def g(): return 2
        finally:
            class C:
                if W:
                    def m(self): ...
    """
    tree = tree_of(world, deep=source)
    for name in ("f", "g", "C", "C.m"):
        assert tree.resolve(f"{world.package}.deep:{name}").defined_as == f"{world.package}.deep:{name}"
    with pytest.raises(SymbolAbsent):
        tree.resolve(f"{world.package}.deep:m")


def test_a_reexport_names_where_it_is_defined(world: World) -> None:
    tree = tree_of(
        world,
        hop1="from .hop2 import g as f",
        hop2="from PKG.core import free as g",
        star="from .core import *",
        itself="from .other import f",
        other="from .itself import f",
    )
    for module, name in (("hop1", "f"), ("hop2", "g"), ("star", "free")):
        with pytest.raises(SymbolMoved) as caught:
            tree.resolve(f"{world.package}.{module}:{name}")
        assert caught.value.definition == f"{world.package}.core:free"
    with pytest.raises(SymbolAbsent):
        tree.resolve(f"{world.package}.itself:f")


def test_an_inherited_method_is_found_through_plain_bases(world: World) -> None:
    tree = tree_of(
        world,
        again="from .core import Engine",
        sub="""
        import PKG.core
        import PKG.core as core
        from PKG import core as module
        from torch import nn
        from .again import Engine as Base
        class One(Base): ...
        class Two(core.Engine): ...
        class Three(nn.Module, One): ...
        class Four(PKG.core.Engine[int]): ...
        class Five(module.Engine): ...
        class Lost(nn.Module): ...
        class Loop(Loop): ...
        """,
    )
    for name in ("One", "Two", "Three", "Four", "Five"):
        symbol = tree.resolve(f"{world.package}.sub:{name}.run")
        assert symbol.defined_as == f"{world.package}.core:Engine.run", name
        assert symbol.file == f"{world.package}/core.py"
        assert f"{world.package}/sub.py" in symbol.files
    for name in ("Lost", "Loop"):
        with pytest.raises(SymbolAbsent):
            tree.resolve(f"{world.package}.sub:{name}.run")


def test_a_target_in_a_package_is_in_its_init_file(world: World) -> None:
    world.write(f"{world.package}/inner/__init__.py", "from ..core import helper\nfrom . import deep\ndef f(): ...")
    world.write(f"{world.package}/inner/deep.py", "from . import f")
    tree = SourceTree.at(world.package, world.site)
    assert tree.resolve(f"{world.package}.inner:f").file == f"{world.package}/inner/__init__.py"
    with pytest.raises(SymbolMoved, match=f"{world.package}.core:helper"):
        tree.resolve(f"{world.package}.inner:helper")
    with pytest.raises(SymbolMoved, match=f"{world.package}.inner:f"):
        tree.resolve(f"{world.package}.inner.deep:f")
    with pytest.raises(SymbolAbsent, match=r"as a module|only imports"):
        tree.resolve(f"{world.package}.inner:deep")


def test_the_tree_may_be_named_by_either_folder(world: World, tmp_path: Path) -> None:
    assert (
        SourceTree.at(world.package, world.site).root == SourceTree.at(world.package, world.site / world.package).root
    )
    with pytest.raises(FileNotFoundError):
        SourceTree.at(world.package, tmp_path)


def test_a_file_that_does_not_parse_is_absent_with_its_name(world: World) -> None:
    tree = tree_of(world, broken="def f(:")
    with pytest.raises(SymbolAbsent, match=r"broken\.py cannot be parsed"):
        tree.resolve(f"{world.package}.broken:f")


def test_only_named_files_are_read(world: World) -> None:
    tree = tree_of(world, broken="def f(:")
    tree.resolve(f"{world.package}.core:Engine.run")
    assert list(tree._files) == [f"{world.package}.core"]


@pytest.mark.parametrize(
    ("bases", "expected"),
    [("Left, Right", "Right"), ("Right, Left", "Right"), ("Left, Far", "Far"), ("Right, Other", "Right")],
)
def test_in_a_diamond_the_class_below_the_common_base_counts_as_in_python(
    world: World, bases: str, expected: str
) -> None:
    text = "class Root:\n    def run(self): return 'Root'\nclass Other:\n    def run(self): return 'Other'\n"
    text += "class Left(Root): pass\nclass Right(Root):\n    def run(self): return 'Right'\n"
    text += "class Between(Root):\n    def run(self): return 'Far'\nclass Far(Between): pass\n"
    world.write(f"{world.package}/diamond.py", f"{text}class Both({bases}): pass\n")
    module = world.load("PKG.diamond")
    assert module.Both().run() == expected
    defined = SourceTree.at(world.package, world.site).resolve(f"{module.__name__}:Both.run").defined_as
    assert defined.rpartition(":")[2] == module.Both.run.__qualname__


# Modules of a package; Python says where PKG.sub:Sub.run is defined.
INHERITED: dict[str, dict[str, str]] = {
    "no diamond": {
        "sub": """
            class P:
                def run(self): ...
            class Q:
                def run(self): ...
            class X1(P): ...
            class X2(Q, P): ...
            class Sub(X1, X2): ...
        """
    },
    "imported, or defined": {
        "fast": "class Base:\n    def run(self): ...",
        "sub": """
            try:
                from .fast import Base
            except ImportError:
                class Base:
                    def run(self): ...
            class Sub(Base): ...
        """,
    },
    "an import after the class": {
        "fast": "class Base:\n    def run(self): ...",
        "sub": """
            class Base:
                def run(self): ...
            class Sub(Base): ...
            from .fast import Base
        """,
    },
    "an import before the class": {
        "fast": "class Base:\n    def run(self): ...",
        "sub": """
            class Base:
                def run(self): ...
            from .fast import Base
            class Sub(Base): ...
        """,
    },
    "in a class": {
        "sub": """
            class Inner:
                def run(self): ...
            class Outer:
                class Inner:
                    def run(self): ...
                class Sub(Inner): ...
            Sub = Outer.Sub
            class Sub(Outer.Sub): ...
        """
    },
    "of a class in a class that inherits it": {
        "sub": """
            class Outer:
                class Inner:
                    def run(self): ...
            class Other(Outer): ...
            class Sub(Other.Inner): ...
        """
    },
    "by the last of two stars": {
        "a": "class Base:\n    def run(self): ...",
        "b": "class Base:\n    def run(self): ...",
        "c": "__all__ = []\nclass Base:\n    def run(self): ...",
        "sub": "from .a import *\nfrom .b import *\nfrom .c import *\nclass Sub(Base): ...",
    },
    "by the last of two imports": {
        "a": "class Base:\n    def run(self): ...",
        "b": "class Base:\n    def run(self): ...",
        "again": "from .a import Base\nfrom .b import Base",
        "sub": "from .again import Base\nclass Sub(Base): ...",
    },
    "by a condition": {
        "sub": """
            class A:
                def run(self): ...
            class B:
                def run(self): ...
            X, Base = 1, A if A else B
            class Sub(Base): ...
        """
    },
    "by what there is": {
        "sub": """
            class B:
                def run(self): ...
            class Sub(B or object): ...
        """
    },
    "a stub for checkers": {
        "sub": """
            from typing import TYPE_CHECKING
            class Base:
                def run(self): ...
            class Sub(Base):
                if TYPE_CHECKING:
                    def run(self, x): ...
                if not TYPE_CHECKING:
                    ...
                else:
                    def run(self, y): ...
        """
    },
    "deleted from the class": {
        "sub": """
            class Base:
                def run(self): ...
            class Sub(Base):
                def run(self): ...
                del run
        """
    },
    "of its own name": {
        "sub": """
            class Sub:
                def run(self): ...
            class Sub(Sub): ...
            class Sub(Sub): ...
            Base = Sub
        """
    },
}


UNDER = {
    "a class under a condition": (
        "C.f",
        "class C:\n    def f(x): ...\n",
        "if A:\n    class C:\n        def f(x): ...\n",
    ),
    "a class under another condition": (
        "C.f",
        "if A:\n    class C:\n        def f(x): ...\n",
        "if not A:\n    class C:\n        def f(x): ...\n",
    ),
    "a base under a condition": (
        "C.f",
        "class B:\n    def f(x): ...\nclass C(B): ...\n",
        "if A:\n    class B:\n        def f(x): ...\nclass C(B): ...\n",
    ),
    "a class on the way under a condition": (
        "C.f",
        "class B:\n    def f(x): ...\nclass M(B): ...\nclass C(M): ...\n",
        "class B:\n    def f(x): ...\nif A:\n    class M(B): ...\nclass C(M): ...\n",
    ),
    "a class in a class that is assigned to": (
        "C.D.f",
        "class C:\n    class D:\n        def f(x): ...\n",
        "class C:\n    class D:\n        def f(x): ...\nC.D = other(C.D)\n",
    ),
}


@pytest.mark.parametrize("name", UNDER)
def test_what_happens_to_the_classes_around_a_symbol_is_drift(world: World, name: str) -> None:
    target, old, new = UNDER[name]
    world.write(f"{world.package}/t.py", old)
    world.declare(world.entry(f"PKG.t:{target}", id="a", kind="official"))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/t.py", new)
    assert world.verify() == 4


def test_names_that_stand_for_each_other_in_two_modules_have_an_end(world: World) -> None:
    tree = tree_of(world, a="from . import b\nC = b.D.x\nclass S(b.D): ...", b="from . import a\nD = a.C.y")
    with pytest.raises(SymbolAbsent):
        tree.resolve(f"{world.package}.a:S.run")


def test_a_ladder_of_names_is_climbed_once(world: World) -> None:
    text = "class A0: ...\n" + "".join(f"A{i + 1} = f(A{i}, A{i})\n" for i in range(40)) + "class S(A40): ...\n"
    tree = tree_of(world, a=text)
    start = time.process_time()
    (owner, _) = tree.file(f"{world.package}.a").classes  # type: ignore[union-attr]
    assert [item.qualname for item in subclasses(tree, owner)] == ["S"]
    assert time.process_time() - start < 3


@pytest.mark.parametrize("name", INHERITED)
def test_what_a_class_inherits_is_found_where_python_finds_it(world: World, name: str) -> None:
    tree = tree_of(world, **INHERITED[name])
    symbol = tree.resolve(f"{world.package}.sub:Sub.run")
    run = world.load("PKG.sub").Sub.run
    assert (symbol.line, symbol.file) == (run.__code__.co_firstlineno, f"{run.__module__.replace('.', '/')}.py")


def test_a_ladder_of_diamonds_is_climbed_once(world: World) -> None:
    text = "class L0:\n    def run(self): ...\n"
    for i in range(40):
        text += f"class A{i}(L{i}): ...\nclass B{i}(L{i}): ...\nclass L{i + 1}(A{i}, B{i}): ...\n"
    tree = tree_of(world, ladder=text)
    start = time.process_time()
    assert tree.resolve(f"{world.package}.ladder:L40.run").defined_as == f"{world.package}.ladder:L0.run"
    assert time.process_time() - start < 5


@pytest.mark.parametrize("target", ["PKG.core:Sub.run", "PKG.core:free"])
def test_a_base_of_another_package_that_comes_first_is_drift(world: World, target: str) -> None:
    path = world.site / world.package / "core.py"
    path.write_text(f"{path.read_text()}\n\nclass Sub(Engine): ...\n")
    world.declare(world.entry(target, relies=["PKG.core:Sub.run"] if target.endswith("free") else []))
    assert (world.pin(), world.verify()) == (0, 0)
    world.core("class Sub(Engine)", "import threading\nclass Sub(threading.Thread, Engine)")
    assert world.verify() == 4
    with pytest.raises(TargetDrifted):
        world.patchset().apply(role="red", process="worker")


def test_a_base_that_gets_the_name_is_seen_at_run_time_too(world: World) -> None:
    world.write(f"{world.package}/mixin.py", "class Mixin: ...\n")
    world.write(
        f"{world.package}/sub.py", "from .core import Engine\nfrom .mixin import Mixin\nclass S(Mixin, Engine): ..."
    )
    patches = world.patchset(world.entry(relies=["PKG.sub:S.run"]))
    world.write(f"{world.package}/mixin.py", "class Mixin:\n    def run(self, x): ...\n")
    assert world.verify() == 4
    with pytest.raises(TargetDrifted):
        patches.apply(role="red", process="worker")


def test_a_stub_for_checkers_after_a_function_is_not_its_definition(world: World) -> None:
    source = """
        from typing import TYPE_CHECKING
        def deco(f): return f
        if not TYPE_CHECKING:
            @deco
            def free(x): return 1
        else:
            def free(x): ...
    """
    symbol = tree_of(world, stub=source).resolve(f"{world.package}.stub:free")
    assert (symbol.decorators, symbol.line) == (1, 6)


@pytest.mark.parametrize("guard", ["", "if 1:\n    "])
def test_a_star_that_begins_to_give_the_name_later_is_seen(world: World, guard: str) -> None:
    world.write(f"{world.package}/other.py", "")
    path = world.site / world.package / "core.py"
    path.write_text(f"{path.read_text()}\n\n{guard}from .other import *\n")
    world.declare(world.entry(kind="official"))
    assert (world.pin(), world.verify()) == (0, 0)
    world.write(f"{world.package}/other.py", "def free(x, scale=2): ...\n")
    assert world.verify() == (4 if guard else 3)


@pytest.mark.parametrize("last", ["from .other import free", "from .first import free\nfrom .other import free"])
def test_an_import_that_comes_last_is_what_counts(world: World, last: str) -> None:
    world.write(f"{world.package}/first.py", "def free(): ...\n")
    world.write(f"{world.package}/other.py", "def free(): ...\n")
    tree = tree_of(world, mine=f"def free(): ...\n{last}\n")
    with pytest.raises(SymbolMoved) as caught:
        tree.resolve(f"{world.package}.mine:free")
    assert caught.value.definition == f"{world.package}.other:free"


def test_what_lies_beside_the_package_is_no_part_of_its_source(world: World) -> None:
    world.write(f"{world.ours}/other.py", "class Base:\n    def run(self): ...\n")
    tree = tree_of(world, sub="from OURS.other import Base\nclass Sub(Base): ...\n")
    with pytest.raises(SymbolAbsent):
        tree.resolve(f"{world.package}.sub:Sub.run")
