"""What a scope binds and deletes: definitions, imports, assignments of every form, found in its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from afdpatch.registry import fingerprint

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Suite(NamedTuple):
    """Statements within a compound statement, and what decides whether they run."""

    name: str
    head: Sequence[ast.AST]
    statements: Sequence[ast.stmt]

    @property
    def for_checkers(self) -> bool:
        """Whether it never runs: under `if TYPE_CHECKING`, or in the `else` of `if not TYPE_CHECKING`."""
        test = self.head[0] if self.head else None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.name == "If.orelse" and _is_checking(test.operand)
        return self.name == "If.body" and isinstance(test, ast.expr) and _is_checking(test)


@dataclass(frozen=True)
class Binding:
    """One statement that binds a name.

    Attributes:
        node: the statement.
        within: the suites that it stands in, the outermost first.
        sure: whether the name is nothing any more that it was before, once the statement has run. A loop may run over
            nothing, a case may not fit, `:=` not be reached, and a star not give it.
    """

    node: ast.stmt
    within: tuple[Suite, ...]
    sure: bool = True

    @property
    def runs(self) -> bool:
        """Whether it runs, and isn't there for type checkers only."""
        return not any(suite.for_checkers for suite in self.within)

    @property
    def guard(self) -> str:
        """The conditions that it stands under."""
        return "".join(f"/{suite.name} {fingerprint.normalise(suite.head)}" for suite in self.within)


def alias_of(node: ast.Import | ast.ImportFrom, bound: str) -> ast.alias:
    """The part of an import that binds a name."""
    return next(alias for alias in node.names if _bound(node, alias) == bound)


def _bound(node: ast.stmt, alias: ast.alias) -> str:
    name = alias.asname or alias.name
    return name.partition(".")[0] if isinstance(node, ast.Import) and not alias.asname else name


def kind_of(node: ast.stmt) -> tuple[str, int]:
    """A definition's kind, and how many decorators it has, `staticmethod` and `classmethod` left out."""
    if isinstance(node, ast.ClassDef):
        return "class", len(node.decorator_list)
    if not isinstance(node, fingerprint.Function):
        return "value", 0
    names = [decorator.id if isinstance(decorator, ast.Name) else "" for decorator in node.decorator_list]
    attributes = [decorator.attr if isinstance(decorator, ast.Attribute) else "" for decorator in node.decorator_list]
    for name in ("staticmethod", "classmethod"):
        if name in names:
            return name, len(names) - 1
    if {"property", "cached_property"} & {*names, *attributes} or {"setter", "deleter", "getter"} & set(attributes):
        return "property", len(names)
    return "function", len(names)


def bindings(statements: Sequence[ast.stmt]) -> dict[str, list[Binding]]:
    """Every binding and deletion of every name in a scope, in the order of the source.

    `if`, `try`, `with`, `match` and loops are entered. An annotation without a value binds nothing.
    """
    table: dict[str, list[Binding]] = {}
    for node, within in _statements(statements):
        sure = set(_surely(node))
        for name in _names(node):
            table.setdefault(name, []).append(Binding(node, within, name in sure))
    return table


def attribute_bindings(statements: Sequence[ast.stmt]) -> dict[str, list[Binding]]:
    """Every assignment to an attribute, and its deletion, by its dotted name, `Engine.run = faster`, as `bindings`."""
    table: dict[str, list[Binding]] = {}
    for node, within in _statements(statements):
        if isinstance(node, (*fingerprint.Function, ast.ClassDef)) or _is_bare_annotation(node):
            continue
        for item in (item for part in fingerprint.own_parts(node) for item in ast.walk(part)):
            if isinstance(item, ast.Attribute) and not isinstance(item.ctx, ast.Load):
                table.setdefault(".".join(dotted(item)), []).append(Binding(node, within))
    return table


def at_import(statements: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, tuple[str, ...]]]:
    """The statements that run when a module is imported, each with the names of the classes around it.

    Functions' bodies don't, nor what stands under `if TYPE_CHECKING`.
    """
    todo: list[tuple[ast.stmt, tuple[str, ...]]] = [(node, ()) for node in reversed(statements)]
    while todo:
        node, classes = todo.pop()
        yield node, classes
        if isinstance(node, ast.ClassDef):
            todo += [(inner, (*classes, node.name)) for inner in reversed(node.body)]
        else:
            suites = [suite for suite in reversed(_suites(node)) if not suite.for_checkers]
            todo += [(inner, classes) for suite in suites for inner in reversed(suite.statements)]


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _is_checking(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_checking, test.values))
    return dotted(test)[-1:] == ["TYPE_CHECKING"]


def _statements(statements: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, tuple[Suite, ...]]]:
    todo: list[tuple[ast.stmt, tuple[Suite, ...]]] = [(node, ()) for node in reversed(statements)]
    while todo:
        node, within = todo.pop()
        yield node, within
        for suite in reversed(_suites(node)):
            todo += [(inner, (*within, suite)) for inner in reversed(suite.statements)]


def _suites(node: ast.stmt) -> list[Suite]:
    """The suites of a compound statement, in the order of the source; those of definitions are scopes of their own."""
    if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
        return []
    kind = type(node).__name__
    handlers: list[ast.ExceptHandler] = getattr(node, "handlers", [])
    found = [
        Suite(f"{kind}.{field}", [] if handlers else list(fingerprint.own_parts(node)), inner)
        for field in ("body", "orelse", "finalbody")
        if (inner := getattr(node, field, None))
    ]
    found[1:1] = [Suite(f"{kind}.except", [item.type] if item.type else [], item.body) for item in handlers]
    if isinstance(node, ast.Match):
        for case in node.cases:
            guard = [case.guard] if case.guard else []
            found.append(Suite(f"{kind}.case", [node.subject, case.pattern, *guard], case.body))
    return found


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (_bound(node, alias) for alias in node.names)
    elif not _is_bare_annotation(node):
        yield from dict.fromkeys(name for part in fingerprint.own_parts(node) for name in _bound_in(part))


def _surely(node: ast.stmt) -> Iterator[str]:
    """Those of a statement's names that it binds, or deletes, whenever it runs."""
    if isinstance(node, (*fingerprint.Function, ast.ClassDef, ast.Import, ast.ImportFrom)):
        yield from (name for name in _names(node) if name != "*")
    elif isinstance(node, ast.Assign | ast.Delete):
        yield from (name for target in node.targets for name in _bound_in(target))
    elif isinstance(node, ast.AnnAssign):
        yield from _bound_in(node.target)
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield from (name for item in node.items if item.optional_vars for name in _bound_in(item.optional_vars))


def _is_bare_annotation(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is None


def _bound_in(node: ast.AST) -> Iterator[str]:
    todo = [node]
    while todo:
        item = todo.pop()
        if isinstance(item, ast.Lambda):
            continue
        if isinstance(item, COMPREHENSIONS):  # their variables are their own; only `:=` reaches out
            yield from (inner.target.id for inner in ast.walk(item) if isinstance(inner, ast.NamedExpr))
            continue
        if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load):
            yield item.id
        elif isinstance(item, ast.MatchAs | ast.MatchStar) and item.name:
            yield item.name
        elif isinstance(item, ast.MatchMapping) and item.rest:
            yield item.rest
        todo += reversed(list(ast.iter_child_nodes(item)))
