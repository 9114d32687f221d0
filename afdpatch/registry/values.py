"""Values that can't be followed by identity (numbers, texts, None): who has taken one over is read from source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from afdpatch.registry.census import STAR, held_lines
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceTree


def import_names(tree: SourceTree, entry: Entry, place: Any) -> Callable[[str], tuple[str, ...]]:
    """What tells the names that a module gives a value by `from … import` at its top level.

    Args:
        tree: the package's source.
        entry: the value's entry.
        place: where the value stands; what stands in a class isn't imported by name.
    """
    word = entry.qualname.encode()

    @functools.cache
    def names(module: str) -> tuple[str, ...]:
        source = tree.file(module) if module != entry.module and not isinstance(place, type) else None
        if source is None or not (module in entry.holders or word in source.data or STAR.search(source.data)):
            return ()
        return tuple(name for name in held_lines(tree, module, entry.target) if "." not in name)

    return names


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
