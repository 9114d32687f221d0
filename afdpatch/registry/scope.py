"""What a scope binds: the definitions, imports and assignments of a module or a class, found in its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afdpatch.registry import fingerprint


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
    """Every binding of every name in a scope, in the order of the source; `if`, `try`, `with` and loops are entered."""
    table: dict[str, list[Binding]] = {}
    for node, guard in _statements(statements, ""):
        for name in _names(node):
            table.setdefault(name, []).append(Binding(node, guard))
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


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (_bound(node, alias) for alias in node.names)
    elif isinstance(node, ast.Assign):
        stored = (name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        yield from (name.id for name in stored if isinstance(name.ctx, ast.Store))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
