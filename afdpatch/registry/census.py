"""The census of holders: the modules of a package that hold a function by `from x import y`. None of them is imported.

Such a module keeps the original when only the defining module's name is rebound. Imports in a function run anew at each
call and those under `if TYPE_CHECKING` never; neither holds anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from afdpatch.registry import fingerprint
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent, module_of

_STAR = re.compile(rb"from\s+([.\w]+)\s+import \*")


def holders_of(tree: SourceTree, target: str) -> tuple[str, ...]:
    """The modules that hold a function of a module under any name, through re-exports and `import *` too, sorted.

    Args:
        tree: the package's source, of which every file is searched and only hits are parsed.
        target: `module:name` of a function of a module.
    """
    name = target.partition(":")[2]
    if "." in name:
        return ()
    held: dict[str, set[str]] = {}
    starred = [
        (module_of(file), source)
        for file, data in tree.contents
        if b"import *" in data
        for source in _STAR.findall(data)
    ]
    # A module that holds it under another name may be imported from by that name.
    searched: set[str] = set()
    while names := {name, *(bound for names in held.values() for bound in names)} - searched:
        for wanted in names:
            _search(tree, target, wanted, held)
        searched |= names
        while more := _starred(tree, target, starred, held):
            held |= more
    return tuple(sorted(held))


def _search(tree: SourceTree, target: str, wanted: str, held: dict[str, set[str]]) -> None:
    letters = wanted.encode()
    word = re.compile(rb"\b%s\b" % re.escape(letters))
    for file, data in tree.contents:
        # The pattern is the slow one: most files don't even have the letters.
        if letters in data and word.search(data):
            found = module_of(file)
            if found not in held and (names := held_names(tree, found, target)):
                held[found] = names


def _starred(
    tree: SourceTree, target: str, starred: Sequence[tuple[str, bytes]], held: dict[str, set[str]]
) -> dict[str, set[str]]:
    """The modules with an `import *` from a module that is named like one that has the target."""
    known = (target.partition(":")[0], *held)
    lasts = {module.rpartition(".")[2].encode(errors="surrogateescape") for module in known} | {b""}
    more = {}
    for found, source in starred:
        if found not in held and source.rpartition(b".")[2] in lasts and (names := held_names(tree, found, target)):
            more[found] = names
    return more


def held_names(tree: SourceTree, module: str, target: str) -> set[str]:
    """The names under which a module holds the target by imports that run when the module is imported."""
    return set(held_lines(tree, module, target))


def held_lines(tree: SourceTree, module: str, target: str) -> dict[str, int]:
    """As `held_names`, each with the line of its import."""
    source = tree.file(module) if module != target.partition(":")[0] else None
    if source is None:
        return {}
    try:
        imports = list(_imports(source.tree.body))
    except SymbolAbsent:
        return {}
    return {name: node.lineno for node in imports for name in _given(tree, source, node, target)}


def _given(tree: SourceTree, source: SourceFile, node: ast.ImportFrom, target: str) -> Iterator[str]:
    module, _, name = target.partition(":")
    origin = source.absolute(node)
    for alias in node.names:
        wanted = name if alias.name == "*" else alias.name
        if alias.name == "*" and name.startswith("_"):
            continue
        if (origin == module and wanted == name) or tree.definition(origin, wanted) == target:
            yield alias.asname or wanted


def _imports(statements: Sequence[ast.stmt]) -> Iterator[ast.ImportFrom]:
    for node in statements:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, fingerprint.Function):
            continue
        elif isinstance(node, ast.If) and _only_for_checkers(node.test):
            yield from _imports(node.orelse)
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, field, []))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _imports(part.body)


def _only_for_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
