"""What can't be patched soundly, as far as source tells: a cache in the place of a function, a field of a dataclass."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from afdpatch.registry.fingerprint import Function
from afdpatch.registry.lineage import Class, base_names, lineage
from afdpatch.registry.scope import alias_of, at_import, dotted
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent

REASONS: dict[str, str] = {
    "functools._lru_cache_wrapper": "its cache would go on answering, and cache_clear and cache_info would be gone",
    "functools.partial": "it is a functools.partial; patch the function that it calls",
    "functools.partialmethod": "it is a functools.partialmethod, which torch.compile refuses; patch what it calls",
    "functools.singledispatchmethod": "its implementations are in a table; patch one of them by its own name",
    "builtins.builtin_function_or_method": "it is made of C; patch the Python function that calls it",
    "builtins.method_descriptor": "it is made of C; patch the Python function that calls it",
    "builtins.wrapper_descriptor": "it is made of C; patch the Python function that calls it",
    "builtins.member_descriptor": "it is a slot of a class with __slots__",
}
"""Why objects of these classes can't be patched, whoever finds one."""
MADE = {
    "lru_cache": "functools._lru_cache_wrapper",
    "cache": "functools._lru_cache_wrapper",
    "singledispatchmethod": "functools.singledispatchmethod",
}
"""Decorators that leave another object than a function, by the last name of where they are defined."""
GENERATED = {
    "init": ("__init__",),
    "repr": ("__repr__",),
    "eq": ("__eq__", "__hash__"),
    "match_args": ("__match_args__",),
    "unsafe_hash": ("__hash__",),
    "order": ("__lt__", "__le__", "__gt__", "__ge__"),
    "frozen": ("__setattr__", "__delattr__"),
    "slots": ("__getstate__", "__setstate__"),
}
"""What a dataclass has of its own if it isn't written, by the option that says so."""
_DEFAULTS = ("init", "repr", "eq", "match_args")
"""The options that say yes if they aren't given."""
_ENUMERATION, _TUPLE, _DATACLASS, _MODEL = "an enumeration", "a named tuple", "a dataclass", "a pydantic model"
FIELDS = {
    "Enum": _ENUMERATION,
    "IntEnum": _ENUMERATION,
    "StrEnum": _ENUMERATION,
    "Flag": _ENUMERATION,
    "IntFlag": _ENUMERATION,
    "NamedTuple": _TUPLE,
    "BaseModel": _MODEL,
}
"""Classes whose subclasses take their fields over when they are made."""
_TEXT = re.compile(r"(?:\s*(\w+)\s*\.)?\s*(\w+)")
"""How `dataclasses` reads an annotation that is a text."""


def why_unpatchable(tree: SourceTree, symbol: Symbol) -> str | None:
    """Why a target can't be patched, or None if its source shows no reason.

    Args:
        tree: the package's source.
        symbol: the target as that source has it.
    """
    try:
        home, nodes = tree.nodes(symbol.defined_as)
    except SymbolAbsent:
        return None
    node = nodes[-1]
    if isinstance(node, Function):
        names = [_origin(tree, home, decorator) for decorator in node.decorator_list]
        made = next((MADE[name] for name in names if name in MADE), None)
        return made and f"an object of {made}: {REASONS[made]}"
    owner, _, name = symbol.name.rpartition(".")
    if symbol.kind != "value" or ":" not in owner:
        return None
    what = _field_of(tree, tree.lineage(owner), name)
    where = f"{owner.partition(':')[2]}.{name}"
    return what and f"{where} is a field of {what}, whose default was taken when the class was made"


def _field_of(tree: SourceTree, classes: Sequence[Class], name: str) -> str | None:
    """What makes a field of a class's value (a dataclass, a model, an enumeration), or None.

    Only an enumeration does so with what has no annotation. What is a field of a base and of no use to the class any
    more, since it is `ClassVar` there, counts as one.

    Args:
        tree: the package's source.
        classes: the class and its bases.
        name: the value's name.
    """
    said = {item: _annotations(item, name) for item in classes}
    typed = {
        item: [node for node in said[item] if not _is_of(item.source, node.annotation, "typing", "ClassVar")]
        for item in classes
    }
    for item in classes:
        for base in item.node.bases:
            kind = FIELDS.get(_origin(tree, item.source, base))
            # A tuple's are its own, whatever their type; a model takes those of all its bases.
            taken = {_ENUMERATION: True, _TUPLE: bool(said[item])}.get(kind or "", any(typed.values()))
            if kind and taken:
                return kind
        if typed[item] and _dataclass_decorators(tree, item):
            return _DATACLASS
    return None


def _annotations(cls: Class, name: str) -> list[ast.AnnAssign]:
    """The statements of a class that annotate a name."""
    ran = (node for node, inner in at_import(cls.node.body) if not inner)
    return [node for node in ran if isinstance(node, ast.AnnAssign) and dotted(node.target) == [name]]


def _is_of(source: SourceFile, annotation: ast.expr, module: str, name: str) -> bool:
    """Whether an annotation is certain to be a name of a module, or that with `[…]`, for `dataclasses` too.

    Those read a text up to its first name, know it only if the file has it from that module, and a text within a text
    not at all, as one is if all annotations are texts.
    """
    if isinstance(annotation, ast.Constant):
        future = any(getattr(item.node, "module", None) == "__future__" for item in source.top("annotations"))
        words = None if future else _TEXT.match(str(annotation.value))
        names = [word for word in words.groups() if word] if words else []
    else:
        names = base_names(annotation)
    found = source.top(names[0]) if names else []
    return bool(found) and all(item.runs and _imports(item.node, names, module, name) for item in found)


def _imports(node: ast.stmt, names: Sequence[str], module: str, name: str) -> bool:
    """Whether a statement imports what a dotted name ends in from a module."""
    if isinstance(node, ast.ImportFrom):
        origin = (module, "typing_extensions") if module == "typing" else (module,)
        return len(names) == 1 and not node.level and node.module in origin and alias_of(node, names[0]).name == name
    return isinstance(node, ast.Import) and names[1:] == [name] and alias_of(node, names[0]).name == module


def generates(tree: SourceTree, cls: Class, name: str) -> bool:
    """Whether a class gets a name of its own that no statement gives it: a slot, a dataclass's method, a field."""
    slots = (part for item in cls.bound("__slots__") for part in ast.walk(item.node))
    if any(isinstance(part, ast.Constant) and part.value == name for part in slots):
        return True
    kind, bare = _bare_field(tree, cls, name)
    # An `InitVar` is a parameter of a dataclass's __init__, and no attribute.
    if bare and not (kind == _DATACLASS and all(_is_of(cls.source, node, "dataclasses", "InitVar") for node in bare)):
        return True
    options = [option for option, methods in GENERATED.items() if name in methods]
    decorators = _dataclass_decorators(tree, cls) if options else []
    return any(_may_be_on(cls.source, decorator, option) for decorator in decorators for option in options)


def takes_over(tree: SourceTree, cls: Class, name: str) -> bool:
    """Whether a class is made with what its bases have of a name: the default of a field that has none of its own."""
    kind, bare = _bare_field(tree, cls, name)
    return bool(bare) and (kind == _MODEL or (kind == _DATACLASS and bool(_dataclass_decorators(tree, cls))))


def _bare_field(tree: SourceTree, cls: Class, name: str) -> tuple[str | None, list[ast.expr]]:
    """What makes a field of what a class only annotates, and the annotations that aren't `ClassVar`."""
    bare = [node.annotation for node in _annotations(cls, name) if node.value is None]
    kind = _field_of(tree, lineage(tree, cls), name) if bare else None
    return kind, [node for node in bare if kind and not _is_of(cls.source, node, "typing", "ClassVar")]


def _may_be_on(source: SourceFile, decorator: ast.expr, option: str) -> bool:
    """Whether a decorator may make a dataclass with an option.

    It doesn't if it says so, or by default if all that it says is seen: by no function of the package around it, no
    table of options, and no configuration, which may say `frozen`.
    """
    given = {item.arg: item.value for item in getattr(decorator, "keywords", [])}
    if option in given:
        return getattr(given[option], "value", None) is not False
    if option in _DEFAULTS or {None, "config"}.intersection(given):
        return True
    names = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
    found = source.top(names[0]) if names[-1:] == ["dataclass"] else []
    return not found or not all(_is_from_outside(source, item.node, names[0]) for item in found)


def _is_from_outside(source: SourceFile, node: ast.stmt, name: str) -> bool:
    """Whether a statement imports a name from another package, and under the name that it has there."""
    if isinstance(node, ast.ImportFrom):
        module = source.absolute(node) if alias_of(node, name).name == name else source.module
    else:
        module = alias_of(node, name).name if isinstance(node, ast.Import) else source.module
    return module.partition(".")[0] != source.module.partition(".")[0]


def _dataclass_decorators(tree: SourceTree, cls: Class) -> list[ast.expr]:
    """The decorators that make a class a dataclass."""
    return [
        item
        for item in cls.node.decorator_list
        if _origin(tree, cls.source, item) == "dataclass" or _makes_dataclasses(tree, cls.source, item)
    ]


def _makes_dataclasses(tree: SourceTree, source: SourceFile, decorator: ast.expr) -> bool:
    """Whether a decorator is a function of the package that is marked with `dataclass_transform`."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not isinstance(node, ast.Name):
        return False
    try:
        _, nodes = tree.nodes(tree.definition(source.module, node.id))
    except SymbolAbsent:
        return False
    return any(
        last_name(item) == "dataclass_transform"
        for node in nodes
        if isinstance(node, Function)
        for item in node.decorator_list
    )


def _origin(tree: SourceTree, source: SourceFile, node: ast.expr) -> str:
    """The last name of what a decorator or a base is: `cache` of `functools.cache`, and of `memo` if that is it.

    Imports of a plain name are followed, and assignments to it; what the package defines itself has no such name.
    """
    seen = set[str]()
    todo: list[tuple[SourceFile, ast.expr | str]] = [(source, node)]
    while todo:
        source, found = todo.pop()
        if isinstance(found, str):
            return found
        node = found
        while isinstance(node, ast.Call | ast.Subscript):
            if isinstance(node, ast.Subscript):
                node = node.value
            else:
                node = node.args[0] if last_name(node) == "partial" and node.args else node.func
        if not isinstance(node, ast.Name):
            if name := last_name(node):
                return name
            continue
        where = tree.definition(source.module, node.id)
        module, _, name = where.partition(":")
        home = tree.file(module)
        bound = [item.node for item in home.top(name)] if home is not None else []
        if home is None or not bound:
            return name
        for statement in bound if where not in seen else ():
            if isinstance(statement, ast.ImportFrom):
                todo.append((home, alias_of(statement, name).name))
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                todo.append((home, statement.value))
        seen.add(where)
    return ""


def last_name(node: ast.expr) -> str:
    """The last name of a decorator, a base or what is called: `cache` of `functools.cache()`."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
