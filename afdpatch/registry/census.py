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
    module, _, name = target.partition(":")
    if "." in name:
        return ()
    word = re.compile(rb"\b%s\b" % re.escape(name.encode()))
    held: dict[str, None] = {}
    starred: list[tuple[str, bytes]] = []
    for file, data in tree.contents:
        found = module_of(file)
        if found == module:
            continue
        # `word` is the slow one: most files don't even have the letters.
        if name.encode() in data and word.search(data) and holds(tree, found, target):
            held[found] = None
        elif b"import *" in data and (sources := _STAR.findall(data)):
            starred += [(found, source) for source in sources]
    while True:
        known = {module, *held}
        lasts = {known_module.rpartition(".")[2].encode() for known_module in known} | {b""}
        more = {
            found
            for found, source in starred
            if found not in known and source.rpartition(b".")[2] in lasts and holds(tree, found, target)
        }
        if not more:
            return tuple(sorted(held))
        held |= dict.fromkeys(sorted(more))


def holds(tree: SourceTree, module: str, target: str) -> bool:
    """Whether a module holds the target by an import that runs when the module is imported."""
    source = tree.file(module)
    if source is None:
        return False
    try:
        return any(_gives(tree, source, node, target) for node in _imports(source.tree.body))
    except SymbolAbsent:
        return False


def _gives(tree: SourceTree, source: SourceFile, node: ast.ImportFrom, target: str) -> bool:
    module, _, name = target.partition(":")
    origin = source.absolute(node)
    for alias in node.names:
        wanted = name if alias.name == "*" else alias.name
        if alias.name == "*" and name.startswith("_"):
            continue
        if (origin == module and wanted == name) or tree.definition(origin, wanted) == target:
            return True
    return False


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
