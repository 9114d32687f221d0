"""Where a symbol is defined: through the bases of classes, imports and `import *`, in the way in which Python would."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from afdpatch.registry import fingerprint
from afdpatch.registry.lineage import Class, bound, imported, lineage, possible
from afdpatch.registry.scope import Binding, kind_of
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent, SymbolMoved


@dataclass(frozen=True)
class Found:
    """A symbol's definitions.

    Attributes:
        source: the file.
        owner: the class that has it, or None.
        passed: the classes that were asked before, of which it inherits.
        bindings: what binds its name, in the order of the source.
        last: the definition that counts.
    """

    source: SourceFile
    owner: Class | None
    passed: tuple[Class, ...]
    bindings: list[Binding]
    last: ast.stmt

    @property
    def cls(self) -> Class | None:
        """It, if it is a class."""
        around = (*self.owner.around, self.owner.node) if self.owner is not None else ()
        return Class(self.source, self.last, around) if isinstance(self.last, ast.ClassDef) else None


def resolve(tree: SourceTree, asked: str) -> tuple[Symbol, list[ast.stmt]]:
    """A symbol, and its definitions, the one that counts last. Raises as `SourceTree.resolve` does."""
    with tree.asking() as modules:
        found = find(tree, asked)
        name = asked.rpartition(":")[2].rpartition(".")[2]
        others, later = _others(tree, found, name)
        files = {source.file for module in tuple(modules) if (source := tree.file(module)) is not None}
    # What an import or a star after it may put in its place is a part of it too.
    items = [*others, *found.bindings, *(item for item in later if item.node.lineno > found.last.lineno)]
    nodes = [item.node for item in items]
    heads = [*found.passed, *(_enclosing(found.owner) if found.owner is not None else ())]
    kind, decorators = kind_of(found.last)
    result = Symbol(
        name=asked,
        defined_as=f"{found.owner.symbol}.{name}" if found.owner is not None else f"{found.source.module}:{name}",
        kind=kind,
        file=found.source.file,
        line=found.last.lineno,
        decorators=decorators,
        body=fingerprint.body(nodes),
        interface=fingerprint.interface(
            nodes, [item.guard for item in items], [item.node for item in heads], [item.guard for item in heads]
        ),
        files=tuple(sorted(files)),
    )
    return result, [node for node in nodes if node is not found.last] + [found.last]


def find(tree: SourceTree, symbol: str) -> Found:
    """A symbol's definitions. Raises as `SourceTree.resolve` does."""
    module, _, qualname = symbol.partition(":")
    source = tree.file(module)
    if source is None:
        raise SymbolAbsent(f"there is no module {module}")
    names = qualname.split(".")
    found = _top(tree, source, names)
    passed: tuple[Class, ...] = ()
    for index, name in enumerate(names[1:], 1):
        owner = found.cls
        if owner is None:
            what = f"{module}:{'.'.join(names[:index])}"
            raise SymbolAbsent(f"{what} is not a class ({found.source.file}:{found.last.lineno})")
        order = (owner,) if owner.bound(name) else lineage(tree, owner)
        at = next((at for at, item in enumerate(order) if item.bound(name)), None)
        if at is None:
            where = f"class {owner.node.name} ({owner.source.file}:{owner.node.lineno})"
            raise SymbolAbsent(f"{where} neither has nor visibly inherits {'.'.join(names[index:])!r}")
        passed += order[:at]
        bindings = order[at].bound(name)
        found = Found(
            order[at].source, order[at], passed, bindings, _counts(tree, order[at].source, names[index:], bindings)
        )
    return found


def _top(tree: SourceTree, source: SourceFile, names: Sequence[str]) -> Found:
    found = bound(tree, source, names[0])
    if found and isinstance(found[-1].node, ast.Delete):
        raise SymbolAbsent(f"{source.file}:{found[-1].node.lineno} deletes {names[0]!r}")
    return Found(source, None, (), found, _counts(tree, source, names, found))


def _counts(tree: SourceTree, source: SourceFile, names: Sequence[str], found: Sequence[Binding]) -> ast.stmt:
    """The definition that counts among the bindings of the first of some names.

    Raises:
        SymbolAbsent: imports bind it.
    """
    defined = [item.node for item in possible(found) or found if _defines(item)]
    if not defined:
        raise _imported(tree, source, names, found)
    ran = [item.node for item in found if _defines(item) and item.runs]
    return (ran or defined)[-1]


def _defines(binding: Binding) -> bool:
    return not isinstance(binding.node, ast.Import | ast.ImportFrom | ast.Delete)


def _enclosing(cls: Class) -> list[Class]:
    """A class and the classes around it, the outermost first."""
    chain = [*cls.around, cls.node]
    return [
        Class(cls.source, node, tuple(chain[:index]))
        for index, node in enumerate(chain)
        if isinstance(node, ast.ClassDef)
    ]


def _others(tree: SourceTree, found: Found, name: str) -> tuple[list[Binding], list[Binding]]:
    """What else the names of the classes around a symbol may be, and what may bind the symbol's own name."""
    if found.owner is None:
        return [], found.source.top("*")
    others: list[Binding] = []
    for cls in _enclosing(found.owner):
        scope = cls.bindings if cls.around else bound(tree, found.source, cls.node.name)
        others += [item for item in scope if item.node is not cls.node]
        if cls.around:
            others += found.source.assigned(cls.qualname)
        else:
            others += [item for item in found.source.top("*") if item.node.lineno > cls.node.lineno]
    return others, found.source.assigned(f"{found.owner.qualname}.{name}")


def definition(tree: SourceTree, module: str, qualname: str, seen: Collection[str] = ()) -> str:
    """Follows `from x import y` from a module to the one that defines a name; stops where it can't be followed."""
    passed = {*seen}
    while True:
        source = tree.file(module)
        here = f"{module}:{qualname}"
        names = qualname.split(".")
        if source is None or here in passed or not source.parses:
            return here
        passed.add(here)
        every = bound(tree, source, names[0])
        found = [item.node for item in possible(every) or every]
        node = found[0] if found else None
        if not isinstance(node, ast.ImportFrom) or any(not isinstance(item, ast.ImportFrom) for item in found):
            return here
        module, onward = imported(tree, source, node, names)
        if not onward:
            return here
        qualname = ".".join(onward)


def definitions(tree: SourceTree, module: str, qualname: str) -> set[str]:
    """Everything that a name of a module may be: as `definition`, by each of the imports that may bind it."""
    ends, seen, todo = set[str](), set[str](), [(module, qualname)]
    while todo:
        module, qualname = todo.pop()
        here = f"{module}:{qualname}"
        if here in seen:
            continue
        seen.add(here)
        source, names = tree.file(module), qualname.split(".")
        if source is None or not source.parses:
            ends.add(here)
            continue
        every = bound(tree, source, names[0])
        nodes = [item.node for item in possible(every) or every]
        led = [imported(tree, source, node, names) for node in nodes if isinstance(node, ast.ImportFrom)]
        onward = [(there, ".".join(rest)) for there, rest in led if rest]
        todo += onward
        if len(onward) < len(nodes) or not nodes:
            ends.add(here)
    return ends


def _imported(tree: SourceTree, source: SourceFile, names: Sequence[str], found: Sequence[Binding]) -> SymbolAbsent:
    node = next((item.node for item in possible(found) or found), None)
    here = there = f"{source.module}:{'.'.join(names)}"
    if isinstance(node, ast.ImportFrom):
        module, onward = imported(tree, source, node, names)
        there = definition(tree, module, ".".join(onward), (here,)) if onward else here
    if there != here:
        return SymbolMoved(f"{source.file} only imports it; it is defined at {there}", there)
    if found:
        return SymbolAbsent(f"{source.file}:{found[-1].node.lineno} imports {names[0]!r} as a module")
    return SymbolAbsent(f"{source.file} has no {names[0]!r}")
