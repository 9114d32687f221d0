from __future__ import annotations

from pathlib import Path

import pytest

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
