"""What has a method or a class attribute of its own, so that a patch of the class's doesn't reach it: read from source.

Subclasses that define it or get it from another base, and assignments to `self.name` that hide the class's from an
instance.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from afdpatch.registry import fingerprint
from afdpatch.registry.lock import Keeper
from afdpatch.registry.scope import bindings
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent, module_of

_BINDS_NEXT = re.compile(rb"\b(?:(?:def|class)\s+|import\b(?:.*\W)?)\Z")
_IS_BOUND = re.compile(rb"\s*[:=][^=]")
_ENDS_INSIDE = re.compile(rb"\w\Z")
_HEAD = re.compile(rb"\bclass\s+\w+\s*\([^)]*\Z")


def overrides_of(tree: SourceTree, target: str, kind: str) -> Iterator[Keeper]:
    """Everything in the package that overrides a target, and the subclasses of a class.

    Args:
        tree: the package's source.
        target: `module:Qualified.name`; what stands in a module itself is overridden by nobody.
        kind: the target's kind, as `Symbol.kind`.
    """
    module, _, qualname = target.partition(":")
    owner, _, last = (qualname, "", "") if kind == "class" else qualname.rpartition(".")
    if not owner:
        return
    home = tree.file(module)
    defined = _class_in(home, owner) if home is not None else None
    if home is not None and defined is not None and last and kind != "property":
        where = f"{module}.{owner}"
        for item in bindings(defined.body).get("__getattribute__", [])[:1]:
            yield Keeper("override", f"{where}.__getattribute__", module, home.file, item.node.lineno)
        yield from _hidden(home, defined, where, last)
    if last and not _bound_twice(tree, last):
        return
    for subclass, source, node in subclasses(tree, f"{module}:{owner}"):
        where = subclass.replace(":", ".")
        if kind == "class":
            yield Keeper("subclass", where, source.module, source.file, node.lineno)
            continue
        own = bindings(node.body)
        lines = [item.node.lineno for name in (last, "__getattribute__") for item in own.get(name, [])[:1]]
        if not lines:
            lines = [base.lineno for base in _other_bases(tree, source, node, target, last)][:1]
        for line in lines:
            yield Keeper("override", f"{where}.{last}", source.module, source.file, line)
        if kind != "property":
            yield from _hidden(source, node, where, last)


def _class_in(source: SourceFile, qualname: str) -> ast.ClassDef | None:
    found = [node for name, node in _classes(source.tree.body, "") if name == qualname]
    return found[-1] if found else None


def _other_bases(
    tree: SourceTree, source: SourceFile, node: ast.ClassDef, target: str, last: str
) -> Iterator[ast.expr]:
    """The bases from which a subclass gets an attribute before it would get the target."""
    for base in node.bases if len(node.bases) > 1 else ():
        where = tree.class_of(source, base)
        try:
            found = tree.resolve(f"{where}.{last}") if where is not None else None
        except SymbolAbsent:
            continue
        if found is not None and found.defined_as == target:
            return
        if found is not None:
            yield base


def _hidden(source: SourceFile, node: ast.ClassDef, where: str, last: str) -> Iterator[Keeper]:
    """The first assignment to an attribute of `self` in each method, by the name of its first parameter."""
    for method in node.body if b".%s" % last.encode() in source.data else ():
        if isinstance(method, fingerprint.Function) and (parameters := [*method.args.posonlyargs, *method.args.args]):
            for item in ast.walk(method):
                if not (isinstance(item, ast.Attribute) and item.attr == last and isinstance(item.ctx, ast.Store)):
                    continue
                if isinstance(item.value, ast.Name) and item.value.id == parameters[0].arg:
                    what = f"{where}.{method.name}, for one object,"
                    yield Keeper("override", what, source.module, source.file, item.lineno)
                    break


def _bound_twice(tree: SourceTree, name: str) -> bool:
    """Whether the package binds a name more than once: else nothing overrides what has it."""
    letters = name.encode()
    # A pattern that begins with letters is searched for as they are; what stands around them is looked at afterwards.
    word, found = re.compile(rb"%s\b" % re.escape(letters)), 0
    for _, data in tree.contents:
        for match in word.finditer(data) if letters in data else ():
            before = data[data.rfind(b"\n", 0, match.start()) + 1 : match.start()]
            found += _BINDS_NEXT.search(before) is not None or (
                not _ENDS_INSIDE.search(before) and _IS_BOUND.match(data, match.end()) is not None
            )
            if found > 1:
                return True
    return False


def subclasses(tree: SourceTree, owner: str) -> Iterator[tuple[str, SourceFile, ast.ClassDef]]:
    """The subclasses of a class in the package, at any distance, as far as their bases are plain names."""
    known, todo = {owner}, [owner]
    while todo:
        wanted = todo.pop()
        name = wanted.rpartition(":")[2].rpartition(".")[2].encode()
        for file, data in tree.contents:
            if name not in data or not (_is_base(data, name) or b"%s as " % name in data):
                continue
            source = tree.source(file)
            if source is None:
                continue
            try:
                classes = list(_classes(source.tree.body, ""))
            except SymbolAbsent:
                continue
            for qualname, node in classes:
                symbol = f"{module_of(file)}:{qualname}"
                if symbol not in known and any(tree.class_of(source, base) == wanted for base in node.bases):
                    known.add(symbol)
                    todo.append(symbol)
                    yield symbol, source, node


def _is_base(data: bytes, name: bytes) -> bool:
    """Whether a name may stand among the bases of a class statement."""
    at = data.find(name)
    while at >= 0:
        if _HEAD.search(data, max(0, at - 500), at):
            return True
        at = data.find(name, at + 1)
    return False


def _classes(statements: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _classes(node.body, f"{prefix}{node.name}.")
        elif not isinstance(node, fingerprint.Function):
            for field in ("body", "orelse", "finalbody"):
                yield from _classes(getattr(node, field, []), prefix)
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _classes(part.body, prefix)
