"""Where the names of a module lead: to which symbols of the package, when a statement uses them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from afdpatch.registry import fingerprint
from afdpatch.registry.lineage import (
    Class,
    Passed,
    binds_at,
    bound,
    bound_before,
    end,
    given,
    imported,
    lineage,
    position,
    possible,
    possible_names,
)
from afdpatch.registry.scope import COMPREHENSIONS, Binding, at_import
from afdpatch.registry.source import SourceFile, SourceTree

_Step = tuple[SourceFile, Sequence[str], Mapping[str, Sequence[Binding]], "ast.stmt | None"]
"""A module, a dotted name in it, the names of the function where it stands, and the statement that uses it."""


class Leads:
    """Follows the names of one module, through its bindings and those of other modules, as far as source shows them."""

    def __init__(self, tree: SourceTree, source: SourceFile) -> None:
        self._tree = tree
        self._source = source

    def ends(
        self,
        names: Sequence[str],
        local: Mapping[str, list[Binding]] | None = None,
        *,
        at: ast.stmt | None = None,
        inside: tuple[str, ...] = (),
        above: bool = False,
    ) -> set[str]:
        """The symbols, `module:Qualified.name`, to which a dotted name may lead.

        Args:
            names: the dotted name.
            local: the names of a function.
            at: the statement of the module that uses it when it is imported; None: some function does at any time.
            inside: the names of the classes around that statement.
            above: a name that a class has from one above it leads there too.
        """
        first: _Step = self._source, names, local or {}, at
        if not names:
            return set()
        # Of modules that import each other, what binds a name last may lead back to itself; then another counts.
        return self._ends(first, inside, above, False) or self._ends(first, inside, above, True)

    def _ends(self, first: _Step, inside: tuple[str, ...], above: bool, all_count: bool) -> set[str]:
        """Where a name leads. In other modules only the bindings count that may be the last, or all do."""
        ends, passed = set[str](), Passed()
        todo = [first]
        while todo:
            source, names, local, at = todo.pop()
            found = local.get(names[0]) or self._bound(source, names[0], at, inside, all_count)
            if not found:
                ends.add(f"{source.module}:{'.'.join(names)}")
            for node in (item.node for item in found):
                if not passed.add(node, names):
                    continue
                if isinstance(node, ast.Import | ast.ImportFrom):
                    module, onward = imported(self._tree, source, node, names)
                    other = self._tree.file(module) if onward else None
                    if other is not None and other.parses:
                        todo.append((other, onward, {}, None))
                    continue
                if isinstance(node, ast.ClassDef) and names[2:]:
                    todo += self._of_attribute(source, node, names[1:])
                elif isinstance(node, ast.ClassDef) and above and names[1:]:
                    classes = lineage(self._tree, Class(source, node))
                    owner = next((cls for cls in classes if cls.bound(names[1])), classes[0])
                    ends.add(f"{owner.symbol}.{names[1]}")
                values = given(node, names[0]) if names[1:] else ()
                if others := [other for value in values for other in possible_names(value)]:  # `E = core.Engine`
                    then = at and node if source is self._source else node
                    todo += [(source, [*other, *names[1:]], local, then) for other in others]
                else:
                    ends.add(f"{source.module}:{'.'.join(names)}")
        return ends

    def _bound(
        self, source: SourceFile, name: str, at: ast.stmt | None, inside: tuple[str, ...], all_count: bool
    ) -> Sequence[Binding]:
        """The bindings of a name in a module, or at a statement of this one, that may be what it stands for."""
        found = bound(self._tree, source, name)
        if source is not self._source:
            before = position(at) if at is not None else None
            return found if all_count else possible(found, before) or found
        if at is None:
            return found
        if own := self._of_class(name, at, inside):
            found = sorted([*found, *own], key=lambda item: binds_at(item.node))
        return self._current(found, name, at, inside)

    def _of_attribute(self, source: SourceFile, node: ast.ClassDef, names: Sequence[str]) -> Iterator[_Step]:
        """The ways on from a name of a class that the class, or one above it, gives to something that has names."""
        for cls in lineage(self._tree, Class(source, node)):
            scope = cls.source.scope(cls.node)
            found = possible(scope.get(names[0], []))
            for item in found:
                if isinstance(item.node, ast.Import | ast.ImportFrom):
                    yield cls.source, names, {names[0]: [item]}, None
                    continue
                before = {name: bound_before(items, position(item.node)) for name, items in scope.items()}
                for other in (other for value in given(item.node, names[0]) for other in possible_names(value)):
                    yield cls.source, [*other, *names[1:]], before, item.node
            if any(not item.within for item in found):
                return

    def _current(self, found: Sequence[Binding], name: str, at: ast.stmt, inside: tuple[str, ...]) -> Sequence[Binding]:
        """The bindings of a name that may be what it stands for at a statement of the module, or in it."""
        parts = fingerprint.own_parts(at) if found[1:] else ()
        unlike = COMPREHENSIONS if inside else (ast.GeneratorExp,)  # none of them sees its class's names
        if any(isinstance(item, unlike) for part in parts for item in ast.walk(part)):
            return found  # a generator goes on reading when later statements have run
        loops = (node for node in self._loops if position(node) <= position(at) <= end(node))
        come = bound_before(found, max(map(end, loops), default=position(at)))
        own = [item for item in found[len(come) : len(come) + 1] if item.node is at]
        first = (index for index in reversed(range(len(come))) if _is_bound_by(come[index], name, at))
        return [*come[next(first, 0) :], *own] or found

    def _of_class(self, name: str, at: ast.stmt, inside: tuple[str, ...]) -> list[Binding]:
        """The bindings of a name in the class whose body a statement stands in."""
        around = self._source.class_around(inside, at)
        return self._source.scope(around).get(name, []) if around is not None else []

    @cached_property
    def _loops(self) -> list[ast.stmt]:
        loops = (ast.For, ast.AsyncFor, ast.While)
        return [node for node, _ in at_import(self._source.tree.body) if isinstance(node, loops)]


def _is_bound_by(binding: Binding, name: str, at: ast.stmt) -> bool:
    """Whether a name is nothing that it was before a binding, when a later statement comes."""
    node = binding.node
    if binding.within or not binds_at(node) < position(at):
        return False
    if isinstance(node, ast.For | ast.AsyncFor) and position(at) <= end(node.body[-1]):  # within its body
        stored = (item for item in ast.walk(node.target) if isinstance(item, ast.Name))
        return any(item.id == name and isinstance(item.ctx, ast.Store) for item in stored)
    return binding.sure
