"""Fingerprints of source: what a symbol does (body) and how it is used (interface), from its syntax tree.

A tree is written out in a form of our own, since `ast.dump` differs between Python versions. Left out are positions,
comments, docstrings (any statement that is only a string), expression contexts, string prefixes and empty fields;
adjacent pieces of an f-string are joined. The result is the same on Python 3.10 to 3.13 for source that all can parse.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence

Function = (ast.FunctionDef, ast.AsyncFunctionDef)

_SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})
_NAMING = ("id", "attr", "arg", "name")
_VALUE_NODES = (ast.Constant, ast.MatchSingleton)


def digest(text: str) -> str:
    """The sha256 of a text, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def normalise(node: object) -> str:
    """Writes a syntax tree, or a list of them, as one line of ASCII."""
    out: list[str] = []
    todo = [_item(node)]  # not by recursion: a sum of a thousand parts is as deep
    while todo:
        item = todo.pop()
        if type(item) is str:
            out.append(item)
        else:
            todo += _written(item)[::-1]
    return "".join(out)


def body(definitions: Sequence[ast.AST]) -> str:
    """The fingerprint of what the definitions of one symbol do.

    Args:
        definitions: every definition of the name in its scope, in the order of the source.
    """
    return digest("\n".join(normalise(_inside(node)) for node in definitions))


def interface(
    definitions: Sequence[ast.AST],
    guards: Sequence[str],
    owners: Sequence[ast.ClassDef],
    owner_guards: Sequence[str],
) -> str:
    """The fingerprint of how a symbol is used: signature, annotations, decorators, bases, and the classes around it.

    Args:
        definitions: as for `body`.
        guards: for each definition, the conditions that it stands under.
        owners: the classes around the symbol, the outermost first.
        owner_guards: for each of them, the conditions that it stands under.
    """
    lines = [f"{guard}{_head(owner)}" for guard, owner in zip(owner_guards, owners, strict=True)]
    lines += [f"{guard} {_head(node)}" for guard, node in zip(guards, definitions, strict=True)]
    return digest("\n".join(lines))


def words(definitions: Sequence[ast.AST], count: int = 8) -> tuple[str, ...]:
    """The longest identifiers in what a symbol's definitions do: a file without them cannot hold the same body."""
    found: set[str] = set()
    for definition in definitions:
        inside = _inside(definition)
        for top in [inside] if isinstance(inside, ast.AST) else inside:
            for node in ast.walk(top):
                found |= {value for name in _NAMING if isinstance(value := getattr(node, name, None), str)}
    return tuple(sorted(found, key=lambda word: (-len(word), word))[:count])


def _inside(node: ast.AST) -> ast.AST | Sequence[ast.AST]:
    if isinstance(node, (*Function, ast.ClassDef)):
        return _Block(node.body)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return node
    annotation = getattr(node, "annotation", None)
    return [part for part in own_parts(node) if part is not annotation and not _is_plain_target(part)]


def own_parts(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement evaluates and binds itself: all but the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from (part for part in ast.iter_child_nodes(child) if not isinstance(part, ast.stmt))
            if isinstance(child, ast.ExceptHandler) and child.name:
                yield ast.copy_location(ast.Name(child.name, ast.Store()), child)
        elif not isinstance(child, ast.stmt):
            yield child


def _is_plain_target(node: ast.AST) -> bool:
    """Whether it is a name alone that is bound: the symbol's own, or another one for the same value."""
    return isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _head(node: ast.AST) -> str:
    kind = type(node).__name__
    if isinstance(node, Function):
        return f"{kind} {node.name} {normalise([node.args, _Optional(node.returns), node.decorator_list])}"
    if isinstance(node, ast.ClassDef):
        return f"{kind} {node.name} {normalise([node.bases, node.keywords, node.decorator_list])}"
    return f"{kind} {normalise(getattr(node, 'annotation', None))}"


class _Block(list[ast.stmt]):
    """The statements of a suite; its bare strings do not count."""


class _Optional:
    """A node, or its absence."""

    def __init__(self, node: ast.AST | None) -> None:
        self.node = node


def _item(value: object) -> object:
    """What stands in a tree, as `normalise` has it to do: text that is written, or something to be taken apart."""
    if type(value) is str:
        return f"str:{value!a}"
    if isinstance(value, (ast.AST, list, _Optional)):
        return value
    if type(value) is int:
        return f"int:{value:#x}"  # Python refuses to write long ones in decimal
    # !a and not !r: which characters repr() shows depends on the Python version's Unicode tables.
    return f"{type(value).__name__}:{value!a}"


def _written(node: object) -> list[object]:
    """One step of `normalise`: the text around a node's parts, and the parts."""
    if isinstance(node, ast.AST):
        return ["(JoinedStr ", _joined(node.values), ")"] if type(node) is ast.JoinedStr else _written_node(node)
    if isinstance(node, _Optional):
        return [_item(node.node)]
    if isinstance(node, _Block):
        kept: list[ast.stmt] = [item for item in node if not _is_bare_string(item)]
        return [kept or [ast.Pass()]]
    assert isinstance(node, list)
    return ["[", *(part for item in node for part in (_item(item), ",")), "]"]


def _written_node(node: ast.AST) -> list[object]:
    out: list[object] = []
    text = f"({type(node).__name__}"
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        if name in _SKIPPED_FIELDS or value == []:
            continue
        if value is None and not (name == "value" and isinstance(node, _VALUE_NODES)):
            continue
        if name in ("body", "orelse", "finalbody") and isinstance(value, list):
            value = _Block(value)
        if isinstance(value, ast.JoinedStr) and not _joined(value.values):
            continue
        item = _item(value)
        text += f" {name}="
        if isinstance(item, str):
            text += item
        else:
            out += [text, item]
            text = ""
    out.append(f"{text})")
    return out


def _is_bare_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _joined(values: Iterable[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, adjacent texts joined and empty ones left out: Python versions differ in those."""
    parts: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            if not value.value:
                continue
            if parts and isinstance(last := parts[-1], ast.Constant) and isinstance(last.value, str):
                parts[-1] = ast.Constant(last.value + value.value)
                continue
        parts.append(value)
    return parts
