"""Who keeps a target's original otherwise than by `from … import`: found in source, before anything is imported.

A default argument, a table, a `functools.partial`, an alias or a subclass is made when its module is imported, and goes
on using what was there then. `references` finds the same at run time, by identity.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from afdpatch.registry import fingerprint
from afdpatch.registry.census import held_lines
from afdpatch.registry.lock import Keeper
from afdpatch.registry.overrides import overrides_of
from afdpatch.registry.scope import alias_of
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent, module_of
from afdpatch.registry.unsound import last_name
from afdpatch.registry.values import loads

WRAPPERS = {
    "partial": "functools.partial",
    "partialmethod": "functools.partialmethod",
    "staticmethod": "staticmethod",
    "classmethod": "classmethod",
    "property": "property",
    "cached_property": "cached_property",
    "lru_cache": "functools cache",
    "cache": "functools cache",
}
"""Calls that give an object which keeps their argument."""
_DISPLAYS = {ast.List: "list", ast.Tuple: "tuple", ast.Set: "set", ast.ListComp: "list", ast.SetComp: "set"}


def keepers_of(tree: SourceTree, target: str, kind: str, holders: Collection[str] = ()) -> tuple[Keeper, ...]:
    """Everything in the package that keeps a target's original, in the order of files and lines.

    Args:
        tree: the package's source. Every file is searched for the target's names; only hits are parsed.
        target: `module:Qualified.name`.
        kind: the target's kind, as `Symbol.kind`. A value that is a constant is kept by whoever reads it at import.
        holders: the modules that import it by name, as the census has them.
    """
    module, _, qualname = target.partition(":")
    found: list[Keeper] = []
    constant = kind == "value" and _is_constant(tree, target)
    for file in _files(tree, module, qualname, holders):
        source = tree.source(file)
        if source is not None:
            try:
                reader = _Reader(tree, source, target, kind)
                kept = reader.keepers()
                lines = {keeper.line for keeper in kept if keeper.sure}
                found += kept
                found += [keeper for keeper in reader.readings() if keeper.line not in lines] if constant else []
            except SymbolAbsent:
                continue  # this Python can't import it either
    for holder in holders:
        for name, line in sorted(held_lines(tree, holder, target).items()):
            source = tree.file(holder)
            found.append(Keeper("import", f"{holder}.{name}", holder, source.file if source else "", line))
    found += overrides_of(tree, target, kind)
    return tuple(sorted(set(found), key=lambda item: (item.file, item.line, item.kind, item.where)))


def _files(tree: SourceTree, module: str, qualname: str, holders: Collection[str]) -> Iterator[str]:
    """The files that can refer to a target: its own, its holders', and those with `owner.name`."""
    own = tree.file(module)
    *outer, last = qualname.split(".")
    owner = (outer[-1] if outer else module.rpartition(".")[2]).encode()
    dotted, read, renamed = b"%s.%s" % (owner, last.encode()), b".%s" % last.encode(), b"%s as " % owner
    for file, data in tree.contents:
        refers = read in data and (dotted in data or renamed in data)
        if refers or (own is not None and file == own.file) or module_of(file) in holders:
            yield file


def _is_constant(tree: SourceTree, target: str) -> bool:
    """Whether a value is a copy wherever it is read: a number, a text, None, or a sum of such."""
    value = getattr(tree.nodes(target)[1][-1], "value", None)
    made = (*_DISPLAYS, ast.Dict, ast.DictComp, ast.Call, ast.Lambda)
    return isinstance(value, ast.expr) and not isinstance(value, made)


class _Reader:
    """Reads what one module does at its import with a target."""

    def __init__(self, tree: SourceTree, source: SourceFile, target: str, kind: str) -> None:
        self._tree = tree
        self._source = source
        self._target = target
        self._kind = kind
        self._home, _, self._qualname = target.partition(":")
        self._inside: list[str] = []

    def keepers(self) -> list[Keeper]:
        return list(self._statements(self._source.tree.body))

    def readings(self) -> Iterator[Keeper]:
        """Each place that reads the target when the module is imported."""
        for node in loads(self._source.tree):
            if self._refers(node):
                yield self._keeper("name", f"what {self._source.module} makes of it at its import", node.lineno)

    # ---- statements: what runs when the module is imported -----------------------------------------------------------

    def _statements(self, statements: Iterable[ast.stmt]) -> Iterator[Keeper]:
        for node in statements:
            if isinstance(node, fingerprint.Function):
                yield from self._function(node)
            elif isinstance(node, ast.ClassDef):
                for value in (*node.decorator_list, *node.keywords):
                    yield from self._held(value, "", self._name(node.name), "argument")
                self._inside.append(node.name)
                yield from self._statements(node.body)
                self._inside.pop()
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._stored(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                if node.value is not None:
                    yield from self._stored(node.target, node.value)
            elif isinstance(node, ast.If) and _only_for_checkers(node.test):
                yield from self._statements(node.orelse)
            else:
                for value in ast.iter_child_nodes(node):
                    if isinstance(value, ast.expr):
                        yield from self._held(value, "", self._name("<statement>"), None)
                for field in ("body", "orelse", "finalbody"):
                    yield from self._statements(getattr(node, field, []))
                for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                    yield from self._statements(part.body)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Keeper]:
        where = self._name(node.name)
        for value in (*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)):
            yield from self._held(value, "a default argument or closure of ", where, "default")
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(decorator, ast.Call) and last_name(call) == "wraps":
                for value in decorator.args:
                    yield from self._held(value, "an attribute of ", where, "wrapper")
            elif isinstance(call, ast.Attribute) and call.attr in ("setter", "getter", "deleter"):
                own = self._inside_owner and node.name == self._qualname.rpartition(".")[2]
                if self._kind == "property" and self._refers(call.value) and not own:
                    yield self._keeper("wrapper", f"property, {where}", node.lineno)
            else:
                yield from self._held(decorator, "", where, "argument")

    def _stored(self, target: ast.expr, value: ast.expr) -> Iterator[Keeper]:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, other in zip(target.elts, value.elts, strict=False):
                yield from self._stored(one, other)
            return
        if isinstance(target, ast.Name):
            if [*self._inside, target.id] == self._qualname.split(".") and self._source.module == self._home:
                return  # a part of the target's own definition
            yield from self._held(value, "", self._name(target.id), "name")
        elif isinstance(target, ast.Attribute):
            if self._source.module != self._home and self._refers(target):
                yield self._keeper("assignment", f"{self._name()}, which assigns to it", target.lineno)
            owner = self._dotted(target)
            where = owner and self._resolved(owner)
            where = where.replace(":", ".") if where else f"{ast.unparse(target)} set in {self._name()}"
            yield from self._held(value, "", where, "attribute")
        else:
            yield from self._held(value, "", f"{ast.unparse(target)} set in {self._name()}", "container")

    # ---- expressions -------------------------------------------------------------------------------------------------

    def _held(self, node: ast.AST, via: str, where: str, kind: str | None) -> Iterator[Keeper]:
        """What keeps the target of what an expression gives; `kind` says what it would be, None: nothing keeps it."""
        if isinstance(node, ast.Name | ast.Attribute):
            if self._refers(node):
                if kind is not None:
                    bound = "bound method, " if self._kind == "classmethod" and isinstance(node, ast.Attribute) else ""
                    yield self._keeper(kind, via + bound + where, node.lineno)
                return
            if isinstance(node, ast.Attribute):
                yield from self._held(node.value, via, where, None)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                name = f"dict[{key.value!r}], " if isinstance(key, ast.Constant) else "dict, "
                yield from self._held(value, via + name, where, kind and "container")
                if key is not None:
                    yield from self._held(key, f"{via}dict, ", where, kind and "container")
        elif type(node) in _DISPLAYS or isinstance(node, ast.DictComp):
            name = _DISPLAYS.get(type(node), "dict")
            for child in ast.iter_child_nodes(node):
                yield from self._held(child, f"{via}{name}, ", where, kind and "container")
        elif isinstance(node, ast.Call):
            yield from self._call(node, via, where, kind)
        elif isinstance(node, ast.Compare | ast.Lambda):
            defaults = [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, ast.Lambda) else []
            for default in defaults:
                if default is not None:
                    yield from self._held(default, f"{via}a default argument or closure of ", where, "default")
        else:
            for child in ast.iter_child_nodes(node):
                yield from self._held(child, via, where, kind)

    def _call(self, node: ast.Call, via: str, where: str, kind: str | None) -> Iterator[Keeper]:
        # What is called is used, not kept.
        wrapper = WRAPPERS.get(last_name(node.func))
        yield from self._held(node.func, via, where, None) if not self._refers(node.func) else ()
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            if wrapper is not None and kind is not None:
                yield from self._held(value, f"{via}{wrapper}, ", where, "wrapper")
            else:
                yield from self._held(value, f"{via}an argument of {ast.unparse(node.func)}, ", where, "argument")

    # ---- names -------------------------------------------------------------------------------------------------------

    def _refers(self, node: ast.expr) -> bool:
        """Whether a name or a dotted name leads to the target."""
        names = self._dotted(node)
        if not names or names[-1] not in self._lasts:
            return False
        own = bool(self._inside) and self._source.module == self._home
        if own and [*self._inside, *names] == self._qualname.split("."):
            return True
        return self._resolved(names) == self._target

    @staticmethod
    def _dotted(node: ast.expr) -> list[str]:
        """The names of `a.b.c`; empty for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return [node.id, *names] if isinstance(node, ast.Name) else []

    @cached_property
    def _lasts(self) -> set[str]:
        """The target's own last name, and the names that the module's imports give it."""
        names = {self._qualname.rpartition(".")[2]}
        if "." not in self._qualname:
            for node in self._source.tree.body:
                if isinstance(node, ast.ImportFrom):
                    names |= {alias.asname for alias in node.names if alias.asname}
        return names

    def _resolved(self, names: Sequence[str]) -> str | None:
        """Where a dotted name leads, as far as it can be followed."""
        found = self._source.top(names[0])
        if not found:
            return self._tree.definition(self._source.module, ".".join(names))  # by `import *`, perhaps
        for binding in found:
            node = binding.node
            if not isinstance(node, ast.Import | ast.ImportFrom):
                return f"{self._source.module}:{'.'.join(names)}"
            alias = alias_of(node, names[0])
            if isinstance(node, ast.ImportFrom):
                origin = self._source.absolute(node)
                inner = f"{origin}.{alias.name}"
                if self._tree.file(inner) is None:
                    return self._tree.definition(origin, ".".join([alias.name, *names[1:]]))
                dotted = [*inner.split("."), *names[1:]]
            else:
                dotted = [*(alias.name if alias.asname else names[0]).split("."), *names[1:]]
            for cut in range(len(dotted) - 1, 0, -1):
                if self._tree.file(".".join(dotted[:cut])) is not None:
                    return self._tree.definition(".".join(dotted[:cut]), ".".join(dotted[cut:]))
        return None

    @property
    def _inside_owner(self) -> bool:
        return self._source.module == self._home and ".".join(self._inside) == self._qualname.rpartition(".")[0]

    def _name(self, *names: str) -> str:
        return ".".join([self._source.module, *self._inside, *names])

    def _keeper(self, kind: str, where: str, line: int) -> Keeper:
        return Keeper(kind, where, self._source.module, self._source.file, line)


def _only_for_checkers(test: ast.expr) -> bool:
    return last_name(test) == "TYPE_CHECKING"
