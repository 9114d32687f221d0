"""Values that can't be followed by identity (numbers, texts, None): who has taken one over is read from source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceTree


def import_names(tree: SourceTree, entry: Entry, place: Any, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The names that modules give a value by `from … import` at their top level.

    Args:
        tree: the package's source.
        entry: the value's entry.
        place: where the value stands; what stands in a class isn't imported by name.
        modules: the modules to look at, beside the entry's holders.
    """
    found: dict[str, tuple[str, ...]] = {}
    if isinstance(place, type):
        return found
    word = entry.qualname.encode()
    for name in dict.fromkeys([*modules, *entry.holders]):
        source = tree.file(name)
        if source is None or name == entry.module or word not in source.data:
            continue
        names = [
            alias.asname or alias.name
            for node in source.tree.body
            if isinstance(node, ast.ImportFrom) and source.absolute(node) == entry.module
            for alias in node.names
            if alias.name == entry.qualname
        ]
        if names:
            found[name] = tuple(names)
    return found


def captures(tree: SourceTree, modules: Iterable[str], name: str) -> list[str]:
    """Where modules use a name while they are imported: as a default, in a class body, in another value."""
    found = []
    for module in modules:
        source = tree.file(module)
        if source is not None:
            lines = sorted({node.lineno for node in _loads(source.tree) if node.id == name})
            found += [f"{source.file}:{line}" for line in lines]
    return found


def _loads(node: ast.AST) -> Iterator[ast.Name]:
    """The names that are read when a module is imported: all but those in the bodies of functions, and annotations."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node
    for field, value in ast.iter_fields(node):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body"
        if inside or field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _loads(child)
