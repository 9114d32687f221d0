"""What a scope binds and deletes: definitions, imports, assignments of every form, found in its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afdpatch.registry import fingerprint

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Binding:
    """One statement that binds a name, and the conditions that it stands under."""

    node: ast.stmt
    guard: str


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

    `if`, `try`, `with`, `match` and loops are entered.
    """
    table: dict[str, list[Binding]] = {}
    for node, guard in _statements(statements, ""):
        for name in _names(node):
            table.setdefault(name, []).append(Binding(node, guard))
    return table


def attribute_bindings(statements: Sequence[ast.stmt]) -> dict[str, list[Binding]]:
    """Every assignment to an attribute, and its deletion, by its dotted name, `Engine.run = faster`, as `bindings`."""
    table: dict[str, list[Binding]] = {}
    for node, guard in _statements(statements, ""):
        if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
            continue
        for item in (item for part in _own_parts(node) for item in ast.walk(part)):
            if isinstance(item, ast.Attribute) and not isinstance(item.ctx, ast.Load):
                table.setdefault(ast.unparse(item), []).append(Binding(node, guard))
    return table


def _statements(statements: Sequence[ast.stmt], guard: str) -> Iterator[tuple[ast.stmt, str]]:
    for node in statements:
        yield node, guard
        if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
            continue
        kind = type(node).__name__
        test = fingerprint.normalise(node.test) if isinstance(node, ast.If | ast.While) else ""
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []), f"{guard}/{kind}.{field} {test}")
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, f"{guard}/{kind}.except {fingerprint.normalise(handler.type)}")
        for case in getattr(node, "cases", []):
            yield from _statements(case.body, f"{guard}/{kind}.case {fingerprint.normalise(case.pattern)}")


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (_bound(node, alias) for alias in node.names)
    else:
        yield from dict.fromkeys(name for part in _own_parts(node) for name in _bound_in(part))


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What a statement evaluates and binds itself: all but the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from (part for part in ast.iter_child_nodes(child) if not isinstance(part, ast.stmt))
            if isinstance(child, ast.ExceptHandler) and child.name:
                yield ast.Name(child.name, ast.Store())
        elif not isinstance(child, ast.stmt):
            yield child


def _bound_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, _COMPREHENSIONS):  # their variables are their own; only `:=` reaches out
        yield from (item.target.id for item in ast.walk(node) if isinstance(item, ast.NamedExpr))
        return
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    for child in ast.iter_child_nodes(node):
        yield from _bound_in(child)
