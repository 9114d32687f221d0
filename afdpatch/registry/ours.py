"""Code of our own that an entry names, found and read without being imported."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from afdpatch.registry.scope import bindings


@dataclass(frozen=True)
class OwnCode:
    """A function that an entry names.

    Attributes:
        name: `module:Qualified.name`.
        path: its module's file; None if there is none.
        line: its line; None if the file has no such name.
        doc: its docstring.
    """

    name: str
    path: Path | None = None
    line: int | None = None
    doc: str | None = None

    @property
    def place(self) -> str:
        """`file:line`, from here where it is below; or what is missing."""
        if self.path is None:
            return f"absent: there is no module {self.name.partition(':')[0]}"
        path = self.path.resolve()
        shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
        return f"{shown}:{self.line}" if self.line else f"absent: {shown} has no {self.name.partition(':')[2]}"


def own_code(name: str) -> OwnCode:
    """Finds `module:Qualified.name` in the source of an installed package; the last definition counts."""
    module, _, qualname = name.partition(":")
    path = _module_file(module)
    if path is None:
        return OwnCode(name)
    try:
        body: list[ast.stmt] = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return OwnCode(name, path)
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in qualname.split("."):
        named = [
            item
            for item in body
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and item.name == part
        ]
        if not named:
            return OwnCode(name, path)
        node = named[-1]
        body = node.body
    return OwnCode(name, path, node.lineno, ast.get_docstring(node)) if node else OwnCode(name, path)


def lacking(name: str) -> str | None:
    """Why `module:Qualified.name` can't be there, by the module's source; None if it may be.

    A module that isn't found from here may be found elsewhere, and one may make its names as it runs.
    """
    module, _, qualname = name.partition(":")
    path = _module_file(module)
    if path is None:
        return None
    try:
        source = path.read_bytes()
        names = bindings(ast.parse(source).body)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path} can't be read: {error}"
    first = qualname.partition(".")[0]
    if b"globals(" in source or names.keys() & {first, "*", "__getattr__"}:
        return None
    return f"{path} has no {first}"


def _module_file(module: str) -> Path | None:
    """A module's file, by the finders of `sys.meta_path`; unlike `find_spec`, no parent package is imported."""
    search: list[str] | None = None
    parts = module.split(".")
    origin: str | None = None
    for index in range(len(parts)):
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(".".join(parts[: index + 1]), search) if find is not None else None
            if spec is not None:
                break
        if spec is None:
            return None
        origin = spec.origin
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return Path(origin) if origin is not None and origin.endswith(".py") else None
