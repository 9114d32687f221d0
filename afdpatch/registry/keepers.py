"""Who keeps a target's original otherwise than by `from … import`: found in source, before anything is imported.

A default argument, a table, a `functools.partial`, an alias or a subclass is made when its module is imported, and goes
on using what was there then. `references` finds the same at run time, by identity.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import TypeGuard

from afdpatch.registry import fingerprint
from afdpatch.registry.census import as_word, held_lines
from afdpatch.registry.leads import Leads
from afdpatch.registry.lineage import bound, imported, possible, possible_names
from afdpatch.registry.lock import Keeper
from afdpatch.registry.overrides import overrides_of
from afdpatch.registry.scope import Binding, at_import, bindings, dotted
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent
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
_IS_READ = rb"(?!\s*[(`]| +(?!(?:if|else|for|in|is|not|and|or|as)\b)\w)"
"""What doesn't follow a name that is kept: a call, or the words of a text."""
_MAKES_CONSTANTS = {
    *("abs", "bool", "bytes", "complex", "float", "format", "frozenset", "int", "len", "max", "min", "pow", "round"),
    *("str", "sum", "tuple", "getenv", "join", "dirname", "basename", "abspath", "realpath"),
}
"""The last names of calls whose result is one."""
_DEFAULT = "a default argument or closure of "
_DISPLAYS = {ast.List: "list", ast.Tuple: "tuple", ast.Set: "set", ast.ListComp: "list", ast.SetComp: "set"}


def keepers_of(tree: SourceTree, target: str, kind: str, holders: Collection[str] = ()) -> tuple[Keeper, ...]:
    """Everything in the package that keeps a target's original, in the order of files and lines.

    Args:
        tree: the package's source. Every file is searched for the target's names; only hits are parsed.
        target: `module:Qualified.name`.
        kind: the target's kind, as `Symbol.kind`. A value that is a constant is kept by whoever reads it at import.
        holders: the modules that import it by name, as the census has them.
    """
    found: list[Keeper] = []
    constant = kind == "value" and _is_constant(tree, target)
    held = {holder: held_lines(tree, holder, target) for holder in holders}
    names = _names(target, held)
    for file in _files(tree, target, holders, names):
        source = tree.source(file)
        if source is not None:
            try:
                reader = _Reader(tree, source, target, kind, names)
                kept = reader.keepers()
                lines = {keeper.line for keeper in kept if keeper.sure}
                found += kept
                found += [keeper for keeper in reader.readings() if keeper.line not in lines] if constant else []
            except SymbolAbsent:
                continue  # this Python can't import it either
    for holder, imports in held.items():
        source = tree.file(holder)
        for name, line in imports.items():
            kept_by = "attribute" if "." in name else "import"  # a class's own isn't rebound
            found.append(Keeper(kept_by, f"{holder}.{name}", holder, source.file if source else "", line))
        found += _instead(tree, source, imports, target) if source else []
    found += overrides_of(tree, target, kind)
    return tuple(sorted(set(found), key=lambda item: (item.file, item.line, item.kind, item.where)))


def readings_of(tree: SourceTree, target: str, modules: Collection[str]) -> list[Keeper]:
    """Each place of some modules that reads a value when it is imported, as `keepers_of` has it for a constant."""
    held = {module: held_lines(tree, module, target) for module in modules}
    names = _names(target, held)
    sources = (tree.file(module) for module in modules)
    readers = (_Reader(tree, source, target, "value", names) for source in sources if source is not None)
    return [keeper for reader in readers for keeper in reader.readings()]


def _names(target: str, held: Mapping[str, Mapping[str, int]]) -> set[str]:
    """A target's last name, and those by which modules hold it."""
    last = target.rpartition(":")[2].rpartition(".")[2]
    return {last, *(name for lines in held.values() for name in lines if "." not in name)}


def _instead(tree: SourceTree, source: SourceFile, names: Collection[str], target: str) -> Iterator[Keeper]:
    """What a holder may have by the target's name in its place: another definition or import, perhaps conditional."""
    for name in names:
        for item in possible(bound(tree, source, name)):
            led = imported(tree, source, item.node, [name]) if isinstance(item.node, ast.ImportFrom) else ("", ())
            if target not in tree.definitions(led[0], ".".join(led[1])):
                where = f"{source.module}.{name}, which something else is bound to as well,"
                yield Keeper("override", where, source.module, source.file, item.node.lineno)


def _files(tree: SourceTree, target: str, holders: Collection[str], names: Collection[str]) -> Iterator[str]:
    """The files that can refer to a target: its own, its holders', and those with a name of it after an owner's."""
    module, _, qualname = target.partition(":")
    own = {source.file for name in (module, *holders) if (source := tree.file(name)) is not None}
    *outer, _ = qualname.split(".")
    last = rb"\.(?:%s)%s" % (b"|".join(map(as_word, names)), _IS_READ)
    read, by_class = re.compile(last), re.compile(rb"(?<![\w\x80-\xff])[_a-z0-9]*[A-Z][\w\x80-\xff]*" + last)
    owners = (
        [outer[-1].encode("utf-8", "surrogateescape")]
        if outer
        else [name.rpartition(".")[2].encode("utf-8", "surrogateescape") for name in (module, *holders)]
    )
    dotted_names = [b"." + name.encode("utf-8", "surrogateescape") for name in names]
    mentions = {file for name in dotted_names for file, _ in tree.containing(name)}
    for file, data in tree.contents:
        if file in own:
            yield file
        elif file not in mentions or not read.search(data):
            continue
        elif outer:  # by any name: of a subclass, of an import, of a name for its class
            if owners[0] in data or by_class.search(data):
                yield file
        elif any(b"%s." % owner in data or b"%s as " % owner in data for owner in owners):
            yield file


def _is_constant(tree: SourceTree, target: str) -> bool:
    """Whether a value is a copy wherever it is read: a number, a text, None, a sum or a conversion to such."""
    value = getattr(tree.nodes(target)[1][-1], "value", None)
    if isinstance(value, ast.Call):
        return last_name(value) in _MAKES_CONSTANTS
    made = (*_DISPLAYS, ast.Dict, ast.DictComp, ast.Lambda)
    return isinstance(value, ast.expr) and not isinstance(value, made)


_Place = tuple[ast.AST, tuple["str | ast.expr", ...], str, "str | None"]
"""An expression, what lies between it and the name that leads there, that name, and the kind of keeper."""


class _Reader:
    """Reads what one module does at its import with a target."""

    def __init__(self, tree: SourceTree, source: SourceFile, target: str, kind: str, names: Collection[str]) -> None:
        self._tree = tree
        self._source = source
        self._target = target
        self._kind = kind
        self._names = names
        self._home, _, self._qualname = target.partition(":")
        self._inside: tuple[str, ...] = ()
        self._at: ast.stmt | None = None
        self._leads = Leads(tree, source)

    def keepers(self) -> list[Keeper]:
        """Everything in the module that keeps the target, or assigns to it."""
        found: list[Keeper] = []
        for node, classes in at_import(self._source.tree.body):
            self._inside, self._at = classes, node
            found += self._statement(node)
        self._inside = ()
        return found

    def readings(self) -> Iterator[Keeper]:
        """Each place that reads the target when the module is imported."""
        for node, classes, statement in loads(self._source):
            self._inside, self._at = classes, statement
            if self._refers(node):
                yield self._keeper("name", f"what {self._source.module} makes of it at its import", node.lineno)
        self._inside = ()

    # ---- statements: what runs when the module is imported -----------------------------------------------------------

    def _statement(self, node: ast.stmt) -> Iterator[Keeper]:
        if self._may_assign:
            yield from self._assigned_by(node) if isinstance(node, fingerprint.Function) else self._assigned(node)
        if isinstance(node, fingerprint.Function):
            yield from self._function(node)
        elif isinstance(node, ast.ClassDef):
            for value in (*node.decorator_list, *node.keywords):
                yield from self._held(value, self._name(node.name), "argument")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._stored(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            if node.value is not None:
                yield from self._stored(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield from self._loop(node)
        else:
            for part in fingerprint.own_parts(node):
                yield from self._held(part, self._name("<statement>"), None)

    def _loop(self, node: ast.For | ast.AsyncFor) -> Iterator[Keeper]:
        """A loop over a table that is written out: its variables keep the last item, and its body may keep each."""
        table = node.iter
        if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute):  # {...}.items()
            table = table.func.value if isinstance(table.func.value, ast.Dict) else table
        where = f"a loop in {self._name()}"
        if not isinstance(table, ast.List | ast.Tuple | ast.Set | ast.Dict):
            yield from self._held(table, where, None)
            return
        variables = {item.id for item in ast.walk(node.target) if isinstance(item, ast.Name)}
        assigned = [item.value for part in node.body for item in ast.walk(part) if isinstance(item, ast.Assign)]
        kept = any(isinstance(value, ast.Name) and value.id in variables for value in assigned)
        items = table.values if isinstance(table, ast.Dict) else table.elts
        for item in items:
            yield from self._held(item, where, "container" if kept or item is items[-1] else "argument")

    def _assigned(self, node: ast.stmt) -> Iterator[Keeper]:
        """Where a statement assigns to the target or deletes it, or does so with it in a subclass."""
        for item in (item for part in fingerprint.own_parts(node) for item in ast.walk(part)):
            if not self._may_be_assigned(item):
                continue
            text = ".".join(dotted(item)) or _text(item)
            ends = self._ends(item)
            if self._source.module == self._home and not self._inside and text == self._qualname:
                continue  # a part of the target's own definition
            if self._target in ends:
                yield self._keeper("assignment", f"{self._source.module}, which assigns to it", item.lineno)
            elif self._inherited(ends) or self._target in self._ends(item, above=True):
                yield self._keeper("override", f"{self._source.module}, which assigns to {text},", item.lineno)

    def _may_be_assigned(self, node: ast.AST) -> TypeGuard[ast.Attribute]:
        last = self._qualname.rpartition(".")[2]
        return isinstance(node, ast.Attribute) and node.attr == last and not isinstance(node.ctx, ast.Load)

    def _assigned_by(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Keeper]:
        """Where a function assigns to the target, should anybody call it."""
        last = self._qualname.rpartition(".")[2]
        local = cache(lambda: _all_bindings(node))
        assigned_to = cache(lambda *names: self._leads.ends(names, local()))
        for item in ast.walk(node):
            if self._may_be_assigned(item):
                ends = {end for names in possible_names(item) for end in assigned_to(*names)}
                assigns = self._target in ends or self._inherited(ends)
            elif isinstance(item, ast.Global) and last in item.names and self._source.module == self._home:
                assigns = last == self._qualname and last in local()
            else:
                continue
            if assigns:
                yield self._keeper("override", f"{self._name(node.name)}, which assigns to it,", item.lineno)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Keeper]:
        where = self._name(node.name)
        for value in (*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)):
            yield from self._held(value, where, "default", _DEFAULT)
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(decorator, ast.Call) and last_name(call) == "wraps":
                for value in decorator.args:
                    yield from self._held(value, where, "wrapper", "an attribute of ")
            elif isinstance(call, ast.Attribute) and call.attr in ("setter", "getter", "deleter"):
                own = self._inside_owner and node.name == self._qualname.rpartition(".")[2]
                if self._kind == "property" and self._refers(call.value) and not own:
                    yield self._keeper("wrapper", f"property, {where}", node.lineno)
            else:
                yield from self._held(decorator, where, "argument")

    def _stored(self, target: ast.expr, value: ast.expr) -> Iterator[Keeper]:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, other in zip(target.elts, value.elts, strict=False):
                yield from self._stored(one, other)
            return
        if isinstance(target, ast.Name):
            if [*self._inside, target.id] == self._qualname.split(".") and self._source.module == self._home:
                return  # a part of the target's own definition
            yield from self._held(value, self._name(target.id), "name")
        elif isinstance(target, ast.Attribute):
            found = min(self._ends(target), default=None)
            where = found.replace(":", ".") if found else f"{_text(target)} set in {self._name()}"
            yield from self._held(value, where, "attribute")
        else:
            yield from self._held(value, f"{_text(target)} set in {self._name()}", "container")

    # ---- expressions -------------------------------------------------------------------------------------------------

    def _held(self, node: ast.AST, where: str, kind: str | None, *via: str) -> Iterator[Keeper]:
        """What keeps the target of what an expression gives; `kind` says what it would be, None: nothing keeps it."""
        todo: list[_Place] = [(node, via, where, kind)]
        while todo:
            for found in self._parts(*todo.pop()):
                if isinstance(found, Keeper):
                    yield found
                else:
                    todo.append(found)

    def _parts(
        self, node: ast.AST, via: tuple[str | ast.expr, ...], where: str, kind: str | None
    ) -> Iterator[Keeper | _Place]:
        """One step of `_held`: a keeper, or the parts to be looked at."""
        inner = kind and "container"
        if isinstance(node, ast.Name | ast.Attribute):
            if self._refers(node):
                if kind is not None:
                    bound = "bound method, " if self._kind == "classmethod" and isinstance(node, ast.Attribute) else ""
                    yield self._keeper(kind, f"{_words(via)}{bound}{where}", node.lineno)
            elif isinstance(node, ast.Attribute):
                yield node.value, via, where, None
        elif isinstance(node, ast.NamedExpr):
            yield node.value, (), self._name(node.target.id), "name"
            yield node.value, via, where, kind
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                name = f"dict[{_text(key)}], " if isinstance(key, ast.Constant) else "dict, "
                yield value, (*via, name), where, inner
                if key is not None:
                    yield key, (*via, "dict, "), where, inner
        elif type(node) in _DISPLAYS or isinstance(node, ast.DictComp):
            name = _DISPLAYS.get(type(node), "dict")
            for child in ast.iter_child_nodes(node):
                yield child, (*via, f"{name}, "), where, inner
        elif isinstance(node, ast.Call):
            yield from self._call(node, via, where, kind)
        elif isinstance(node, ast.IfExp):
            yield node.test, via, where, None
            yield node.body, via, where, kind
            yield node.orelse, via, where, kind
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            for child in ast.iter_child_nodes(node):
                yield child, via, where, None
        elif isinstance(node, ast.Compare | ast.Lambda):
            defaults = [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, ast.Lambda) else []
            for default in defaults:
                if default is not None:
                    yield default, (*via, _DEFAULT), where, "default"
        else:
            for child in ast.iter_child_nodes(node):
                yield child, via, where, kind

    def _call(self, node: ast.Call, via: tuple[str | ast.expr, ...], where: str, kind: str | None) -> Iterator[_Place]:
        # What is called is used, not kept.
        wrapper = WRAPPERS.get(last_name(node.func))
        if not self._refers(node.func):
            yield node.func, via, where, None
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            if wrapper is not None and kind is not None:
                yield value, (*via, f"{wrapper}, "), where, "wrapper"
            else:
                yield value, (*via, node.func), where, "argument"

    # ---- names -------------------------------------------------------------------------------------------------------

    def _refers(self, node: ast.expr) -> bool:
        """Whether a name or a dotted name leads to the target."""
        if (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) not in self._lasts:
            return False
        names = dotted(node)
        own = bool(self._inside) and self._source.module == self._home
        if own and [*self._inside, *names] == self._qualname.split("."):
            return True
        if len(names) == 1 and self._source.is_of_class(self._inside, names[0], node):
            return False
        ends = self._ends(node, above=True)
        return self._target in ends or self._inherited(ends)

    def _ends(self, node: ast.expr, above: bool = False) -> set[str]:
        """Where the dotted names that an expression may be may lead at the statement that is read; `above` as in
        `Leads.ends`."""
        found = (self._leads.ends(each, at=self._at, inside=self._inside, above=above) for each in possible_names(node))
        return {end for ends in found for end in ends}

    def _inherited(self, ends: Collection[str]) -> bool:
        """Whether one of some symbols is the target by a subclass."""
        for symbol in ends:
            with suppress(SymbolAbsent):
                if "." in symbol.partition(":")[2] and self._tree.resolve(symbol).defined_as == self._defined_as:
                    return True
        return False

    @cached_property
    def _lasts(self) -> set[str]:
        """The target's last names, and the names that the module's imports give it."""
        names = set(self._names)
        if "." not in self._qualname:
            for node, _ in at_import(self._source.tree.body):
                if isinstance(node, ast.ImportFrom):
                    names |= {alias.asname for alias in node.names if alias.asname}
        return names

    @cached_property
    def _may_assign(self) -> bool:
        """Whether the text has an assignment to an attribute of the target's name, or makes it a global of a function.

        Most files don't, and need no walk through their functions.
        """
        last = as_word(self._qualname.rpartition(".")[2])
        ways = rb"\.%s(?:[^\n=(]|\\\r?\n){0,200}=(?!=)|\b(?:for|as|del|global)\b[^\n]{0,200}%s" % (last, last)
        return re.search(ways, self._source.data) is not None

    @cached_property
    def _defined_as(self) -> str:
        return self._tree.resolve(self._target).defined_as

    @property
    def _inside_owner(self) -> bool:
        return self._source.module == self._home and ".".join(self._inside) == self._qualname.rpartition(".")[0]

    def _name(self, *names: str) -> str:
        return ".".join([self._source.module, *self._inside, *names])

    def _keeper(self, kind: str, where: str, line: int) -> Keeper:
        return Keeper(kind, where, self._source.module, self._source.file, line)


def _all_bindings(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[Binding]]:
    """What binds each name in a function, or in the functions and classes in it."""
    table: dict[str, list[Binding]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, (*fingerprint.Function, ast.ClassDef)):
            for name, found in bindings(inner.body).items():
                table.setdefault(name, []).extend(found)
    return table


def _words(via: Sequence[str | ast.expr]) -> str:
    return "".join(part if isinstance(part, str) else f"an argument of {_text(part)}, " for part in via)


def _text(node: ast.expr) -> str:
    """Source of an expression, or its beginning's kind if that is too deep or too long."""
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):
        return f"<{type(node).__name__}>"
