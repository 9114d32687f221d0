"""Where the names of a module lead: to which symbols of the package, when a statement uses them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cached_property

from afdpatch.registry import fingerprint
from afdpatch.registry.lineage import (
    Passed,
    binds_at,
    bound,
    bound_before,
    branches,
    end,
    given,
    imported,
    position,
    possible,
)
from afdpatch.registry.scope import COMPREHENSIONS, Binding, at_import, dotted
from afdpatch.registry.source import SourceFile, SourceTree

_Step = tuple[SourceFile, Sequence[str], Mapping[str, list[Binding]], "ast.stmt | None"]
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
    ) -> set[str]:
        """The symbols, `module:Qualified.name`, to which a dotted name may lead.

        Args:
            names: the dotted name.
            local: the names of a function.
            at: the statement of the module that uses it when it is imported; None: some function does at any time.
            inside: the names of the classes around that statement.
        """
        ends, passed = set[str](), Passed()
        todo: list[_Step] = [(self._source, names, local or {}, at)] if names else []
        while todo:
            source, names, local, at = todo.pop()
            found = local.get(names[0]) or self._bound(source, names[0], at, inside)
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
                values = [part for value in given(node, names[0]) for part in branches(value)] if names[1:] else []
                others = [other for other in map(dotted, values) if other]
                if others:  # `E = core.Engine`
                    todo += [(source, [*other, *names[1:]], local, at and node) for other in others]
                else:
                    ends.add(f"{source.module}:{'.'.join(names)}")
        return ends

    def _bound(self, source: SourceFile, name: str, at: ast.stmt | None, inside: tuple[str, ...]) -> Sequence[Binding]:
        """The bindings of a name in a module, or at a statement of this one, that may be what it stands for."""
        found = bound(self._tree, source, name)
        if source is not self._source:
            return possible(found) or found
        if at is None:
            return found
        if own := self._of_class(name, at, inside):
            found = sorted([*found, *own], key=lambda item: binds_at(item.node))
        return self._current(found, name, at, inside)

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
