"""Values that can't be followed by identity (numbers, texts, None): who has taken one over is read from source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from afdpatch.registry.census import STAR, held_lines
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
        if source is None or name == entry.module:
            continue
        if name in entry.holders or word in source.data or STAR.search(source.data):
            names = tuple(held for held in held_lines(tree, name, entry.target) if "." not in held)
            if names:
                found[name] = names
    return found


def captures(tree: SourceTree, modules: Iterable[str], name: str) -> list[str]:
    """Where modules use a name while they are imported: as a default, in a class body, in another value."""
    found = []
    for module in modules:
        source = tree.file(module)
        if source is not None:
            lines = {item.lineno for item in loads(source.tree) if isinstance(item, ast.Name) and item.id == name}
            found += [f"{source.file}:{line}" for line in sorted(lines)]
    return found


def loads(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """The names and attributes that are read when a module is imported: not in functions' bodies, nor annotations."""
    todo = [node]
    while todo:
        item = todo.pop()
        if isinstance(item, ast.Name | ast.Attribute) and isinstance(item.ctx, ast.Load):
            yield item
        for field, value in ast.iter_fields(item):
            inside = isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body"
            if not inside and field not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                todo += [child for child in children if isinstance(child, ast.AST)]
