"""Values that can't be followed by identity (numbers, texts, None): who has taken one over is read from source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

from afdpatch.registry.census import STAR, held_lines
from afdpatch.registry.fingerprint import own_parts
from afdpatch.registry.manifest import Entry
from afdpatch.registry.scope import at_import
from afdpatch.registry.source import SourceFile, SourceTree


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


def loads(source: SourceFile) -> Iterator[tuple[ast.Name | ast.Attribute, tuple[str, ...], ast.stmt]]:
    """The names and attributes that are read when a module is imported.

    Each comes with the names of the classes around it, and its statement.

    What stands in functions' bodies isn't, nor annotations, nor what is for type checkers only.
    """
    for statement, classes in at_import(source.tree.body):
        said = [getattr(statement, field, None) for field in ("annotation", "returns")]
        todo = [part for part in own_parts(statement) if part not in said]
        while todo:
            item = todo.pop()
            if isinstance(item, ast.Name | ast.Attribute) and isinstance(item.ctx, ast.Load):
                yield item, classes, statement
            skipped = "body" if isinstance(item, ast.Lambda) else "annotation"
            for field, value in ast.iter_fields(item):
                if field != skipped:
                    todo += [
                        child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
                    ]
