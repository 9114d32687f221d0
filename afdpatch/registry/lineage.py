"""Classes as source has them: what the name of a base stands for, and the order in which Python looks through bases."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from afdpatch.registry import fingerprint
from afdpatch.registry.scope import Binding, alias_of, dotted

if TYPE_CHECKING:
    from afdpatch.registry.source import SourceFile, SourceTree


@dataclass(frozen=True)
class Class:
    """A class statement.

    Attributes:
        source: its file.
        node: the statement.
        around: the classes and functions around it, the outermost first.
    """

    source: SourceFile
    node: ast.ClassDef
    around: tuple[ast.AST, ...] = ()

    @property
    def qualname(self) -> str:
        """Its qualified name."""
        names = [
            f"{_name(node)}.<locals>" if isinstance(node, fingerprint.Function) else _name(node) for node in self.around
        ]
        return ".".join([*names, self.node.name])

    @property
    def symbol(self) -> str:
        """`module:Qualified.name`."""
        return f"{self.source.module}:{self.qualname}"

    @property
    def bindings(self) -> list[Binding]:
        """What binds its name in the scope that it stands in, in the order of the source."""
        name = self.node.name
        return self.source.scope(self.around[-1]).get(name, []) if self.around else self.source.top(name)

    @property
    def guard(self) -> str:
        """The conditions that it stands under in that scope."""
        return next((item.guard for item in self.bindings if item.node is self.node), "")

    def bound(self, name: str) -> list[Binding]:
        """What gives the class an attribute of its own, in the order of the source; empty if it ends up without."""
        found = self.source.scope(self.node).get(name, [])
        if any(not isinstance(item.node, ast.Delete) for item in possible(found)):
            return found
        assigned = self.source.assigned(f"{self.qualname}.{name}")
        return assigned if any(not isinstance(item.node, ast.Delete) for item in assigned) else []


def _name(node: ast.AST) -> str:
    return str(getattr(node, "name", ""))


def possible(found: Sequence[Binding], before: tuple[int, int] | None = None) -> list[Binding]:
    """The bindings of a name that may be what it stands for, the likeliest first.

    The last one comes first, what an `except` binds after the rest; one that is sure and unconditional ends them.

    Args:
        found: the bindings, in the order of the source.
        before: line and column; what is bound there or later doesn't count.
    """
    kept: list[Binding] = []
    for item in reversed(found if before is None else bound_before(found, before)):
        if item.runs:
            kept.append(item)
            if item.sure and not item.within:
                break
    return sorted(kept, key=lambda item: any(suite.name.endswith(".except") for suite in item.within))


def bound_before(found: Sequence[Binding], before: tuple[int, int]) -> Sequence[Binding]:
    """Those of some bindings, in the order of the source, that have bound before a line and column."""
    return found[: bisect_left(found, before, key=lambda item: binds_at(item.node))]


def binds_at(node: ast.stmt) -> tuple[int, int]:
    """From where on there is what a statement binds: a class is made when its body has run."""
    return end(node) if isinstance(node, ast.ClassDef) else position(node)


def position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Where a statement or an expression begins."""
    return node.lineno, node.col_offset


def end(node: ast.stmt) -> tuple[int, int]:
    """Where a statement ends."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def lineage(tree: SourceTree, cls: Class) -> tuple[Class, ...]:
    """A class and its bases in the order in which Python looks through them, as far as they can be followed."""
    todo, begun = [cls], dict[Class, tuple[tuple[Class, ...], dict[str, None]]]()
    while todo:  # not by recursion: a class may have a thousand above it
        item = todo[-1]
        if item in begun:
            above, asked = begun.pop(item)
            asked.update((module, None) for base in above for module in tree.lineages[base][1])
            orders = [tree.lineages[base][0] for base in above]
            order = _merged([*orders, above]) if len(orders) > 1 else (one for only in orders for one in only)
            tree.lineages[item] = (item, *order), tuple(asked)
        elif item not in tree.lineages:
            tree.lineages[item] = ((item,), ())  # what leads back to itself has nothing more
            with tree.asking() as asked:
                above = bases(tree, item)
            begun[item] = above, asked
            todo += [base for base in above if base not in tree.lineages]
            continue
        todo.pop()
    known = tree.lineages[cls]
    for module in known[1]:
        tree.file(module)
    return known[0]


def bases(tree: SourceTree, cls: Class) -> tuple[Class, ...]:
    """The direct bases that can be followed."""
    found = (next(named(tree, cls, base), None) for base in cls.node.bases)
    return tuple(dict.fromkeys(base for base in found if base is not None and base != cls))


def _merged(orders: Sequence[Sequence[Class]]) -> Iterator[Class]:
    """Python's own merge, C3; where there is no order, which Python refuses, the first comes first."""
    while orders := [order for order in orders if order]:
        heads = (order[0] for order in orders)
        head = next((head for head in heads if not any(head in order[1:] for order in orders)), orders[0][0])
        yield head
        orders = [[item for item in order if item != head] for order in orders]


def named(tree: SourceTree, cls: Class, base: ast.expr) -> Iterator[Class]:
    """The classes that one of a class's bases may be, the likeliest first; none if it can't be followed."""
    names = _Names(tree, branches)
    for node in branches(base):
        yield from names.visible(cls.source, cls.around, base_names(node), position(cls.node))


def mentioned(tree: SourceTree, cls: Class, base: ast.expr) -> Iterator[Class]:
    """The classes that one of a class's bases may be made of: `f(Engine)` of Engine; what is in `[…]` doesn't count."""
    names = _Names(tree, parts)
    for node in parts(base):
        yield from names.visible(cls.source, cls.around, base_names(node), position(cls.node))


def branches(value: ast.expr) -> Iterator[ast.expr]:
    """What an expression may be: `A` and `B` of `A if … else B` and of `A or B`."""
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.IfExp):
            todo += [node.orelse, node.body]
        elif isinstance(node, ast.BoolOp):
            todo += reversed(node.values)
        elif isinstance(node, ast.NamedExpr):
            todo.append(node.value)
        else:
            yield node


def possible_names(value: ast.expr) -> Iterator[list[str]]:
    """The dotted names that an expression may be: `A.x` and `B.x` of `(A or B).x`, `A.x` of `(C := A).x`."""
    todo: list[tuple[ast.expr, list[str]]] = [(value, [])]
    while todo:
        node, rest = todo.pop()
        while isinstance(node, ast.Attribute):
            rest = [node.attr, *rest]
            node = node.value
        if isinstance(node, ast.Name):
            yield [node.id, *rest]
        elif isinstance(node, ast.IfExp | ast.BoolOp | ast.NamedExpr):
            todo += [(branch, rest) for branch in branches(node)]


def parts(value: ast.expr) -> Iterator[ast.expr]:
    """The dotted names of what an expression may be made of: not what it calls, nor what a table has or `[…]`."""
    todo: list[ast.AST] = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Subscript):
            todo.append(node.value)
        elif isinstance(node, ast.expr) and base_names(node):
            yield node
        elif not isinstance(node, ast.Dict):
            called = node.func if isinstance(node, ast.Call) and base_names(node.func) else None
            todo += [child for child in ast.iter_child_nodes(node) if child is not called]


def base_names(node: ast.expr) -> list[str]:
    """The names of `a.b.c` and of `a.b.c[…]`; empty for anything else."""
    return dotted(node.value if isinstance(node, ast.Subscript) else node)


_LONGEST, _MOST = 50, 1000
"""Of how many parts a dotted name is at most, and how many of them a binding has; one that grows has no end."""


_Steps = Iterator["Class | _Steps"]
"""Classes, and what leads to further ones."""


class Passed:
    """The dotted names that were followed by each binding of their first name."""

    def __init__(self) -> None:
        self._by_node: dict[ast.stmt, set[tuple[str, ...]]] = {}

    def add(self, node: ast.stmt, names: Sequence[str]) -> bool:
        """Adds one; false if it was there already, or leads to no end."""
        known = self._by_node.setdefault(node, set())
        if tuple(names) in known or len(names) > _LONGEST or len(known) >= _MOST:
            return False
        known.add(tuple(names))
        return True


class _Names:
    """Follows dotted names to classes.

    Args:
        tree: the package's source.
        parts_of: the expressions that count of one that is assigned to a name.
    """

    def __init__(self, tree: SourceTree, parts_of: Callable[[ast.expr], Iterator[ast.expr]]) -> None:
        self._tree = tree
        self._parts_of = parts_of
        self._passed = Passed()

    def visible(
        self, source: SourceFile, around: tuple[ast.AST, ...], names: Sequence[str], before: tuple[int, int] | None
    ) -> Iterator[Class]:
        """The classes that a dotted name may stand for at a place in a module."""
        todo = [self._visible(source, around, names, before)]
        while todo:  # not by recursion: a name may stand for another a thousand times
            found = next(todo[-1], None)
            if isinstance(found, Class):
                yield found
            elif found is None:
                todo.pop()
            else:
                todo.append(found)

    def _visible(
        self, source: SourceFile, around: tuple[ast.AST, ...], names: Sequence[str], before: tuple[int, int] | None
    ) -> _Steps:
        if not names:
            return
        inner: tuple[ast.AST, ...] = around
        while inner:
            scope, inner_most = inner[-1], inner == around
            if isinstance(scope, fingerprint.Function) or inner_most:  # a class's names are seen in its own body only
                found = possible(source.scope(scope).get(names[0], []), before)
                for item in found:
                    yield self._led(source, inner, item, names)
                if any(isinstance(scope, fingerprint.Function) or not item.within for item in found):
                    return  # else a class may be without it
            if isinstance(scope, fingerprint.Function):
                before = None  # what is around has run when the function does
            inner = inner[:-1]
        for item in possible(bound(self._tree, source, names[0]), before):
            yield self._led(source, (), item, names)

    def _led(self, source: SourceFile, around: tuple[ast.AST, ...], binding: Binding, names: Sequence[str]) -> _Steps:
        """The classes to which a binding of a dotted name's first name leads."""
        node, rest = binding.node, names[1:]
        if not self._passed.add(node, names):
            return
        if isinstance(node, ast.ClassDef):
            yield self._attribute(Class(source, node, around), rest)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module, onward = imported(self._tree, source, node, names)
            other = self._tree.file(module) if onward else None
            if other is not None and other.parses:
                yield self._visible(other, (), onward, None)
        else:
            for value in (part for item in given(node, names[0]) for part in self._parts_of(item)):
                yield self._visible(source, around, _and(base_names(value), rest), position(node))

    def _attribute(self, cls: Class, names: Sequence[str]) -> _Steps:
        if not names:
            yield cls
            return
        for owner in lineage(self._tree, cls):
            if found := possible(owner.bound(names[0])):
                for item in found:
                    yield self._led(owner.source, (*owner.around, owner.node), item, names)
                return


def given(node: ast.stmt, name: str) -> list[ast.expr]:
    """What a statement may give to a name: its value, or the part that stands where the name does; a loop's items."""
    pairs: list[tuple[ast.expr, ast.expr]] = [(item.target, item.value) for item in walruses(node)]
    if isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple):
        pairs += [(node.target, item) for item in node.iter.elts]
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        pairs += [(target, node.value) for target in targets]
    found = []
    for target, value in pairs:
        inner = [(target, value)]
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            inner = list(zip(target.elts, value.elts, strict=False))
        found += [part for one, part in inner if not isinstance(one, ast.Name) or one.id == name]
    return found


def walruses(node: ast.stmt) -> list[ast.NamedExpr]:
    """The `name := value` in what a statement evaluates itself."""
    return [item for part in fingerprint.own_parts(node) for item in ast.walk(part) if isinstance(item, ast.NamedExpr)]


def _and(names: Sequence[str], rest: Sequence[str]) -> list[str]:
    return [*names, *rest] if names else []


def imported(
    tree: SourceTree, source: SourceFile, node: ast.Import | ast.ImportFrom, names: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """The module in which a dotted name goes on whose first name an import binds, and its names there."""
    if isinstance(node, ast.ImportFrom):
        module = source.absolute(node)
        if node.names[0].name == "*":
            return module, names
        name = alias_of(node, names[0]).name
        inner = f"{module}.{name}"
        if tree.file(inner) is None:
            return module, [name, *names[1:]]
        path = [*inner.split("."), *names[1:]]
    else:
        alias = alias_of(node, names[0])
        path = [*(alias.name if alias.asname else names[0]).split("."), *names[1:]]
    for cut in range(len(path) - 1, 0, -1):
        if tree.file(".".join(path[:cut])) is not None:
            return ".".join(path[:cut]), path[cut:]
    return ".".join(path), []


def bound(tree: SourceTree, source: SourceFile, name: str) -> list[Binding]:
    """The bindings of a name at a module's top level, those `import *` among them that give it."""
    stars = [item for item in source.top("*") if name != "*" and _gives(tree, source, item, name)]
    if not stars:
        return source.top(name)
    stars = [replace(item, sure=_surely_gives(tree, source, item, name)) for item in stars]
    return sorted([*source.top(name), *stars], key=lambda item: position(item.node))


def _surely_gives(tree: SourceTree, source: SourceFile, star: Binding, name: str) -> bool:
    """Whether an `import *` is sure to give a name: its module's own, or that of the last star there."""
    seen: set[str] = set()
    stars = [star]
    while stars and isinstance(stars[-1].node, ast.ImportFrom):
        other = tree.file(source.absolute(stars[-1].node))
        if other is None or other.module in seen or not other.parses or not other.surely_exports(name):
            return False
        seen.add(other.module)
        if any(item.sure and not (item.within or isinstance(item.node, ast.Delete)) for item in other.top(name)[-1:]):
            return True
        source, stars = other, [item for item in other.top("*") if not item.within]
    return False


def _gives(tree: SourceTree, source: SourceFile, star: Binding, name: str) -> bool:
    """Whether an `import *` gives a name."""
    seen, todo = set[str](), [(source, star.node)]
    while todo:
        source, node = todo.pop()
        other = tree.file(source.absolute(node)) if isinstance(node, ast.ImportFrom) else None
        if other is None or other.module in seen or not other.parses or not other.exports(name):
            continue
        seen.add(other.module)
        if other.top(name):
            return True
        todo += [(other, item.node) for item in reversed(other.top("*"))]
    return False
