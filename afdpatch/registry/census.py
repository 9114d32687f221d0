"""The census of holders: the modules of a package that hold a function by `from x import y`. None of them is imported.

Such a module keeps the original when only the defining module's name is rebound. Imports in a function run anew at each
call and those under `if TYPE_CHECKING` never; neither holds anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from afdpatch.registry.scope import at_import
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent, module_of

STAR = re.compile(rb"import[\s\\]*\*")
_STAR_OF = re.compile(rb"(?:(?<![\w\x80-\xff])([\w\x80-\xff]+)[\s\\]+|\.[\s\\]*)import[\s\\]*\*")
"""The last name before it, none after a dot."""


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
        if STAR.search(data)
        for source in _STAR_OF.findall(data)
    ]
    # A module that holds it under another name may be imported from by that name.
    searched: set[str] = set()
    while names := {name, *(bound for names in held.values() for bound in names if "." not in bound)} - searched:
        for wanted in names:
            _search(tree, target, wanted, held)
        searched |= names
        while more := _starred(tree, target, starred, held):
            held |= more
    return tuple(sorted(held))


def _search(tree: SourceTree, target: str, wanted: str, held: dict[str, set[str]]) -> None:
    letters = wanted.encode("utf-8", "surrogateescape")
    word = re.compile(as_word(wanted))
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
        if found not in held and source in lasts and (names := held_names(tree, found, target)):
            more[found] = names
    return more


def as_word(name: str) -> bytes:
    r"""A pattern for a name in the bytes of source, where `\b` knows no letters but ASCII's."""
    return rb"(?<![\w\x80-\xff])%s(?![\w\x80-\xff])" % re.escape(name.encode("utf-8", "surrogateescape"))


def held_names(tree: SourceTree, module: str, target: str) -> set[str]:
    """The names under which a module holds the target by imports that run when the module is imported."""
    return set(held_lines(tree, module, target))


def held_lines(tree: SourceTree, module: str, target: str) -> dict[str, int]:
    """As `held_names`, each with the line of its import. What a class holds has the class's name before its own."""
    source = tree.file(module) if module != target.partition(":")[0] else None
    if source is None:
        return {}
    held: dict[str, int] = {}
    try:
        for node, classes in at_import(source.tree.body):
            if isinstance(node, ast.ImportFrom):
                held |= {".".join([*classes, name]): node.lineno for name in _given(tree, source, node, target)}
    except SymbolAbsent:
        return {}
    return held


def _given(tree: SourceTree, source: SourceFile, node: ast.ImportFrom, target: str) -> Iterator[str]:
    """The names that an import binds to the target."""
    origin = source.absolute(node)
    for alias in node.names:
        for name in _names_of(tree, origin, target) if alias.name == "*" else [alias.name]:
            if f"{origin}:{name}" == target or target in tree.definitions(origin, name):
                yield name if alias.name == "*" else alias.asname or name


def _names_of(tree: SourceTree, origin: str, target: str) -> Iterator[str]:
    """The names by which `import *` from a module may give the target: its own, and those of other imports."""
    source = tree.file(origin)
    if source is None:
        return
    names = {target.partition(":")[2]}
    names |= {
        alias.asname
        for node, classes in at_import(source.tree.body)
        if isinstance(node, ast.ImportFrom) and not classes
        for alias in node.names
        if alias.asname
    }
    yield from (name for name in sorted(names) if source.exports(name))
