"""What has a method or a class attribute of its own, so that a patch of the class's doesn't reach it: read from source.

Subclasses that define it or get it from another base, and assignments to `self.name` that hide the class's from an
instance.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from afdpatch.registry import fingerprint
from afdpatch.registry.lineage import Class, bases, branches, given, lineage, mentioned
from afdpatch.registry.lock import Keeper
from afdpatch.registry.scope import COMPREHENSIONS, Binding, dotted
from afdpatch.registry.source import SourceFile, SourceTree, SymbolAbsent
from afdpatch.registry.unsound import generates, last_name, takes_over

_FAR = 2000
"""The longest head of a class that is looked at, in bytes."""
_PLAIN_HEAD = re.compile(rb"class\s+[^\s(:\[]+\s*(?:\([^()#'\"\[]*\)\s*)?:")
_TEXTS = re.compile(rb"#[^\n]*|'[^'\n]*'|\"[^\"\n]*\"|(\\\r?\n)")
_GROUP = re.compile(rb"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_OPEN = re.compile(rb"[(\[{][^)\]}]*\Z")
_OPEN_HEAD = re.compile(rb"class\b[^:(]*\(")
_RENAMED = re.compile(rb"[\s\\]+as[\s\\]")
_WORD = re.compile(rb"[\w\x80-\xff]")
_GOES_ON = re.compile(rb"[\w\x80-\xff]|\s*[.(]")
_IN_TABLE = re.compile(rb"\{|['\"][^\n]*\Z")  # or in a text
_IS_ALIAS = re.compile(rb"(?<![=!<>])=[\s\\]*(?:[^\W\d][\w.]*\.)?\Z")
_ENDS_LINE = re.compile(rb"\s*(?:;|#|\r?\n|\Z)")
_ASSIGNS = re.compile(rb"\s*[^\W\d][\w\x80-\xff., \t]*(?:[+|]|:[^=]*)?=(?!=)")


def overrides_of(tree: SourceTree, target: str, kind: str) -> Iterator[Keeper]:
    """Everything in the package that overrides a target, and the subclasses of a class.

    Args:
        tree: the package's source.
        target: `module:Qualified.name`; what stands in a module itself is overridden by nobody.
        kind: the target's kind, as `Symbol.kind`.
    """
    module, _, qualname = target.partition(":")
    owner, _, last = (qualname, "", "") if kind == "class" else qualname.rpartition(".")
    home = _lineage(tree, f"{module}:{owner}") if owner else ()
    if not home:
        return
    if kind == "class":
        for item in subclasses(tree, home[0]):
            yield _keeper("subclass", item.symbol, item, item.node)
        return
    hideable = kind != "property" or _is_cached(tree, target)
    for item in home:
        for binding in item.bound("__getattribute__")[:1]:
            yield _keeper("override", f"{item.symbol}.__getattribute__", item, binding.node)
        yield from _hidden(item, last) if hideable else ()
    looked = set(home)
    private = last.startswith("__") and not last.endswith("__")
    for item in subclasses(tree, home[0]):
        if private and item.node.name.lstrip("_") != home[0].node.name.lstrip("_"):
            continue  # Python gives its private names that of their class
        yield from _own(tree, item, home[0], last)
        for part in lineage(tree, item) if hideable else ():
            if part not in looked:
                looked.add(part)
                yield from _hidden(part, last)


def _lineage(tree: SourceTree, owner: str) -> tuple[Class, ...]:
    try:
        return tree.lineage(owner)
    except SymbolAbsent:
        return ()


def _is_cached(tree: SourceTree, target: str) -> bool:
    """Whether a property is one that an object's own value hides."""
    node = tree.nodes(target)[1][-1]
    return "cached_property" in [last_name(item) for item in getattr(node, "decorator_list", [])]


def _keeper(kind: str, where: str, item: Class, node: ast.stmt | ast.expr) -> Keeper:
    return Keeper(kind, where.replace(":", "."), item.source.module, item.source.file, node.lineno)


def _own(tree: SourceTree, item: Class, owner: Class, last: str) -> Iterator[Keeper]:
    """What a subclass has in a target's place, be it of its own or of another base that comes before the owner."""
    found = [[one for one in item.bound(name) if one.runs] for name in (last, "__getattribute__")]
    nodes: list[ast.stmt] = [ran[0].node for ran in found if ran]
    reached = any(_reached(tree, base, last, owner) is owner for base in bases(tree, item))
    same = _reached(tree, item, last, owner) is owner
    if not nodes and (generates(tree, item, last) or (reached and not same)):
        nodes = [item.node]
    if same and takes_over(tree, item, last) and not any(isinstance(one, fingerprint.Function) for one in item.around):
        yield _keeper("default", f"a default argument or closure of {item.symbol}.__init__", item, item.node)
    overridden = any(isinstance(one.node, fingerprint.Function) for one in owner.bound(last))
    calls = not overridden or all(
        isinstance(one.node, fingerprint.Function) and _goes_on(tree, item, one.node) for one in found[0]
    )
    where = f"{item.symbol}.{last}" if calls else f"{item.symbol}.{last}, which doesn't call what it overrides,"
    for node in nodes:
        yield _keeper("override", where, item, node)


def _goes_on(tree: SourceTree, cls: Class, method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method uses what it overrides, as `super().run` or `Base.run`: then a patch of that has its effect."""
    above = {item.node.name for item in lineage(tree, cls)}
    above.update(name for base in cls.node.bases for name in dotted(base)[-1:])
    used = [node for node in ast.walk(method) if isinstance(node, ast.Attribute) and node.attr == method.name]
    if any(_is_super(node.value) or above.intersection(dotted(node.value)[-1:]) for node in used):
        return True
    if not any(isinstance(node.value, ast.Name) for node in used):
        return False
    scope = cls.source.scope(method)
    named = {name for name, found in scope.items() if all(map(_is_super, _given(found, name)))}
    named.difference_update(*(node.names for node in ast.walk(method) if isinstance(node, ast.Nonlocal)))
    own = {id(node) for node in _own_nodes(method)}
    return any(id(node) in own and getattr(node.value, "id", "") in named for node in used)


def _given(found: Sequence[Binding], name: str) -> Iterator[ast.expr | None]:
    """What a function's bindings give to a name; None for what can't be read."""
    for item in found:
        yield from given(item.node, name) or (None,)


def _is_super(value: ast.expr | None) -> bool:
    """Whether an expression is `super()`, whatever is decided in it."""
    return value is not None and all(
        isinstance(part, ast.Call) and dotted(part.func) == ["super"] for part in branches(value)
    )


def _own_nodes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Everything in a function that is in no scope within it."""
    todo: list[ast.AST] = [*method.body]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*fingerprint.Function, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)):
            todo += ast.iter_child_nodes(node)


def _reached(tree: SourceTree, item: Class, last: str, owner: Class) -> Class | None:
    """The class in which Python finds an attribute, or the owner of the patch if that comes first."""
    return next(
        (owner if one == owner else one for one in lineage(tree, item) if one == owner or one.bound(last)), None
    )


def _hidden(item: Class, last: str) -> Iterator[Keeper]:
    """The first assignment to an attribute of `self` in each method, by the name of its first parameter."""
    if b".%s" % last.encode("utf-8", "surrogateescape") not in item.source.data:
        return
    methods = [binding.node for found in item.source.scope(item.node).values() for binding in found]
    for method in methods:
        if isinstance(method, fingerprint.Function) and (parameters := [*method.args.posonlyargs, *method.args.args]):
            for node in ast.walk(method):
                if not (isinstance(node, ast.Attribute) and node.attr == last and isinstance(node.ctx, ast.Store)):
                    continue
                if _is_own(node.value, parameters[0].arg):
                    yield _keeper("override", f"{item.symbol}.{method.name}, for one object,", item, node)
                    break


def _is_own(node: ast.expr, parameter: str) -> bool:
    """Whether a method names its object so, or the object's class, of which the same is said."""
    if isinstance(node, ast.Call) and dotted(node.func) == ["type"] and len(node.args) == 1:
        node = node.args[0]
    return dotted(node) in ([parameter], [parameter, "__class__"])


def subclasses(tree: SourceTree, owner: Class) -> Iterator[Class]:
    """The subclasses of a class in the package, at any distance, as far as their bases can be followed.

    A class made of what a call makes of one (`class Sub(mixed(Engine))`) is among them.
    """
    known, todo = {owner}, [owner]
    made_of: dict[Class, set[Class]] = {}
    while todo:
        wanted = todo.pop()
        for source in _sources(tree, wanted):
            for item in source.classes:
                if item not in made_of:
                    made_of[item] = {one for base in item.node.bases for one in mentioned(tree, item, base)}
                if item not in known and wanted in made_of[item]:
                    known.add(item)
                    todo.append(item)
                    yield item


def _sources(tree: SourceTree, wanted: Class) -> Iterator[SourceFile]:
    """The files that may have a subclass of a class, by its name and by every other that the package gives it."""
    names, searched = [wanted.node.name], set[str]()
    for name in names:
        letters = name.encode("utf-8", "surrogateescape")
        for file, data in tree.containing(letters):
            if not (leads(data, letters) or file == wanted.source.file):
                continue
            source = tree.source(file)
            if source is None or not source.parses:
                continue
            names += sorted(source.other_names.get(name, set()).difference(names))
            if file not in searched:
                searched.add(file)
                yield source


def leads(data: bytes, name: bytes) -> bool:
    """Whether a name may stand among the bases of a class statement, or be given on under another name."""
    at = data.find(name)
    while at >= 0:
        end = at + len(name)
        if _RENAMED.match(data, end) or _is_assigned(data, at, end) or _in_head(data, at):
            return True
        at = data.find(name, end)
    return False


def _is_assigned(data: bytes, at: int, end: int) -> bool:
    """Whether a place is in the value of an assignment; what is called there, or of which a part is taken, isn't."""
    if _GOES_ON.match(data, end) or _WORD.match(data, at - 1) or b"=" not in data[max(0, at - _FAR) : at]:
        return False
    if _ENDS_LINE.match(data, end) and _IS_ALIAS.search(data[max(0, at - 200) : at]):
        return True  # whatever stands above it, such as a docstring that looks like code
    text = _plain(data[max(0, at - _FAR) : at])
    opened = _OPEN.search(text)
    begin = text.rfind(b"\n", 0, opened.start() if opened else len(text)) + 1
    return b":=" in text[begin:] or (_ASSIGNS.match(text, begin) is not None and not _IN_TABLE.search(text, begin))


def _plain(text: bytes) -> bytes:
    """A text without comments, texts and what is in brackets; lines that a backslash joins are one."""
    text = _TEXTS.sub(lambda found: b" " if found[1] else b"", text)
    while text != (text := _GROUP.sub(b"", text)):
        pass
    return text


def _in_head(data: bytes, at: int) -> bool:
    """Whether a place is among the bases of a class statement: comments, texts and what is in brackets left out."""
    low, start = max(0, at - _FAR), at
    while (start := data.rfind(b"class", low, start)) >= 0:
        before = data[max(0, start - 200) : start]
        if _WORD.match(data, start + 5):
            continue  # `classes`, say
        if (b"\n" in before or start <= 200) and not before.rpartition(b"\n")[2].strip():
            break
    if start < 0 or _PLAIN_HEAD.match(data, start, at):
        return False
    return _OPEN_HEAD.match(_plain(data[start:at])) is not None
