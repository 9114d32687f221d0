"""Three-way drift: what changed under a patch, and whether that touches what our replacement relies on.

The pinned source is read from a source tree that is proven to be the pinned one by its fingerprints; a lock holds none.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afdpatch.registry.compat import Absence, Part, Standing, TreeView, examine_entry
from afdpatch.registry.errors import OtherVersion
from afdpatch.registry.fingerprint import Function, normalise
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.ours import own_code
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent

NOISE = frozenset({"self", "cls", "original", *dir(builtins)})
"""Names that tell nothing."""


@dataclass(frozen=True)
class Touch:
    """A name that stands in the changed lines and in our replacement.

    Attributes:
        name: the name.
        upstream: what it is in the changed lines: `call`, `attribute`, `parameter`, `keyword`, `name`.
        ours: what it is in our replacement.
        line: the first line of our replacement's file that has it.
    """

    name: str
    upstream: tuple[str, ...]
    ours: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class SymbolDrift:
    """One symbol, pinned and new.

    Attributes:
        symbol: its name in the manifest.
        standing: how it is now.
        detail: that in words.
        old: `file:line` of the pinned one.
        new: `file:line` of the new one; None if it is gone.
        diff: the unified diff of its source, comments and the heads of the classes around it included.
        touches: the names of the change that our replacement has too.
        parameters: the pinned and the new parameters, if they differ and our replacement must have the same.
    """

    symbol: str
    standing: Standing
    detail: str
    old: str
    new: str | None
    diff: tuple[str, ...]
    touches: tuple[Touch, ...]
    parameters: tuple[str, str] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        touches = [vars(touch) for touch in self.touches]
        return {**vars(self), "standing": self.standing.value, "touches": touches}


@dataclass(frozen=True)
class Drift:
    """What became of everything that a patch stands on.

    Attributes:
        entry: the patch.
        ours: `file:line` of our replacement; None if it has none.
        ours_text: our replacement's source, with the functions of its module that it uses.
        symbols: the target first, then the relied-on symbols.
        others: who else holds, keeps or overrides the target and didn't, or no longer holds it.
    """

    entry: Entry
    ours: str | None
    ours_text: str
    symbols: tuple[SymbolDrift, ...]
    others: tuple[Part, ...]

    @property
    def standing(self) -> Standing:
        """The worst of all."""
        return Standing.worst([item.standing for item in self.symbols] + [part.standing for part in self.others])

    @property
    def touched(self) -> bool:
        """Whether a change touches what our replacement relies on: a name, the parameters, or the very existence."""
        gone = (Standing.MOVED, Standing.GONE)
        return any(item.touches or item.parameters or item.standing in gone for item in self.symbols)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.entry.id,
            "kind": self.entry.kind,
            "standing": self.standing.value,
            "touches_ours": self.touched,
            "replacement": self.entry.replacement,
            "ours": self.ours,
            "ours_text": self.ours_text,
            "symbols": [symbol.as_dict() for symbol in self.symbols],
            "others": [vars(part) | {"standing": part.standing.value} for part in self.others],
        }


@dataclass(frozen=True)
class _Text:
    """A symbol's source: the heads of the classes around it and its definitions, as one text.

    Attributes:
        place: `file:line` of the definition.
        lines: the text.
        uses: every name in it, what it is there, and which of the lines it is in.
        parameters: the definition's, as one text.
    """

    place: str
    lines: list[str]
    uses: list[tuple[str, str, int]]
    parameters: str

    def add(self, source: SourceFile, begin: int, end: int, parts: Iterable[ast.AST]) -> None:
        """Adds lines of a file, and the names that these parts of its tree have in them."""
        start = len(self.lines)
        self.lines.extend(_lines(source.data)[begin - 1 : end])
        self.uses.extend((name, role, start + line - begin) for part in parts for name, role, line in _uses(part))


def three_way(entry: Entry, lock: Lock, base: SourceTree, new: SourceTree) -> Drift:
    """Compares the pinned source of an entry's symbols, the new one, and our replacement.

    Args:
        entry: an entry of the lock.
        lock: what was pinned.
        base: the pinned release's source.
        new: the source of the other release.

    Raises:
        OtherVersion: `base` isn't what was pinned.
    """
    ours = _Ours.find(entry)
    parts = examine_entry(entry, lock, TreeView(new))
    symbols = []
    for name, part in zip(entry.symbols, parts, strict=False):
        pinned = lock.symbols[name]
        try:
            found = base.resolve(name)
        except SymbolAbsent as error:
            raise _not_pinned(entry, pinned, base, str(error)) from error
        if (found.body, found.interface) != (pinned.body, pinned.interface):
            raise _not_pinned(entry, pinned, base, f"another body or interface ({found.file}:{found.line})")
        symbols.append(_symbol_drift(entry, part, pinned, base, new, ours))
    return Drift(entry, ours.place, ours.text, tuple(symbols), parts[len(symbols) :])


def _not_pinned(entry: Entry, pinned: Symbol, base: SourceTree, found: str) -> OtherVersion:
    return OtherVersion(
        f"{base.label} is not the pinned source",
        patch_id=entry.id,
        symbol=pinned.name,
        expected=f"{pinned.kind} at {pinned.file}:{pinned.line}, body {pinned.body[:12]}",
        found=found,
        todo="name the pinned release's source with --base (its wheel will do)",
    )


def _symbol_drift(
    entry: Entry, part: Part, pinned: Symbol, base: SourceTree, new: SourceTree, ours: _Ours
) -> SymbolDrift:
    old_text = _text(base, pinned.name)
    assert old_text is not None, "three_way has resolved it"
    if part.standing is Standing.SAME:
        return SymbolDrift(pinned.name, part.standing, "", old_text.place, f"{pinned.file}:{pinned.line}", (), (), None)
    here = TreeView(new).look(pinned)
    where = here.moved_to if isinstance(here, Absence) else pinned.name
    new_text = _text(new, where) if where else None
    diff = difflib.unified_diff(
        old_text.lines,
        new_text.lines if new_text else [],
        f"pinned/{old_text.place}",
        f"new/{new_text.place}" if new_text else "gone",
        lineterm="",
    )
    parameters = None
    if new_text and entry.patches_target and pinned.name == entry.target:
        pair = (old_text.parameters, new_text.parameters)
        parameters = pair if pair[0] != pair[1] else None
    return SymbolDrift(
        symbol=pinned.name,
        standing=part.standing,
        detail=part.detail,
        old=old_text.place,
        new=new_text.place if new_text else None,
        diff=tuple(diff),
        touches=_touches(_changed_names(old_text, new_text), ours.names) if ours.names else (),
        parameters=parameters,
    )


def _text(tree: SourceTree, symbol: str) -> _Text | None:
    """A symbol's source, or None if it isn't there."""
    try:
        found = tree.resolve(symbol)
        source, nodes = tree.nodes(symbol)
    except SymbolAbsent:
        return None
    text = _Text(f"{source.file}:{nodes[-1].lineno}", [], [], _parameters(nodes))
    for owner in dict.fromkeys([*_owners(symbol), *_owners(found.defined_as)]):
        there, (*_, node) = tree.nodes(owner)
        if isinstance(node, ast.ClassDef):
            parts = (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords))
            end = max([node.lineno, *(part.end_lineno or 0 for part in parts)])
            text.add(there, _begin(node), end, parts)
    for node in nodes:  # Several definitions of one name are compared as one text.
        text.add(source, _begin(node), node.end_lineno or node.lineno, [node])
    return text


def _owners(symbol: str) -> list[str]:
    """The classes around a symbol, the outermost first."""
    module, _, qualname = symbol.partition(":")
    parts = qualname.split(".")
    return [f"{module}:{'.'.join(parts[:count])}" for count in range(1, len(parts))]


def _lines(data: bytes) -> list[str]:
    """A file's lines as Python counts them: a form feed or one of Unicode's separators ends none."""
    return re.split("\r\n|\r|\n", data.decode("utf-8", "replace"))


def _begin(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def _parameters(nodes: list[ast.stmt]) -> str:
    node = nodes[-1]
    if not isinstance(node, Function):
        return ""
    try:
        return ast.unparse(node.args)
    except RecursionError:  # a default that is a sum of a thousand parts, say
        return normalise(node.args)


def _changed_names(old: _Text, new: _Text | None) -> dict[str, set[str]]:
    """The names in the lines that only one of two texts has, and what they are there."""
    gone: set[int] = set()
    come: set[int] = set()
    matcher = difflib.SequenceMatcher(None, old.lines, new.lines if new else [], autojunk=False)
    for tag, a_begin, a_end, b_begin, b_end in matcher.get_opcodes():
        if tag != "equal":
            gone |= set(range(a_begin, a_end))
            come |= set(range(b_begin, b_end))
    names: dict[str, set[str]] = {}
    for text, changed in ((old, gone), (new, come)):
        for name, role, line in text.uses if text else ():
            if line in changed:
                names.setdefault(name, set()).add(role)
    return names


def _uses(top: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Every name in a tree, what it is there, and its line."""
    for node in ast.walk(top):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                yield called.id, "call", called.lineno
            elif isinstance(called, ast.Attribute):
                yield called.attr, "call", called.end_lineno or called.lineno
        elif isinstance(node, ast.Name):
            yield node.id, "name", node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, "attribute", node.end_lineno or node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, "parameter", node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, "keyword", node.lineno
        elif isinstance(node, (*Function, ast.ClassDef)):
            yield node.name, "definition", node.lineno


def _touches(changed: dict[str, set[str]], ours: dict[str, tuple[set[str], int]]) -> tuple[Touch, ...]:
    return tuple(
        Touch(name, tuple(sorted(changed[name])), tuple(sorted(ours[name][0])), ours[name][1])
        for name in sorted(changed.keys() & ours.keys())
        if name not in NOISE
    )


@dataclass(frozen=True)
class _Ours:
    """Our replacement: its place, its source, and the names that it uses with what they are and their first line."""

    place: str | None
    text: str
    names: dict[str, tuple[set[str], int]]

    @classmethod
    def find(cls, entry: Entry) -> _Ours:
        if entry.replacement is None:
            return cls(None, "", {})
        own = own_code(entry.replacement)
        if own.path is None or own.line is None:
            return cls(own.place, "", {})
        data = own.path.read_bytes()
        lines = _lines(data)
        nodes = _reachable(ast.parse(data).body, entry.replacement.partition(":")[2].partition(".")[0])
        names: dict[str, tuple[set[str], int]] = {}
        for node in nodes:
            for name, role, line in _uses(node):
                if role != "definition":
                    roles, first = names.setdefault(name, (set(), line))
                    roles.add(role)
                    names[name] = (roles, min(first, line))
        text = "\n\n".join("\n".join(lines[_begin(node) - 1 : node.end_lineno]) for node in nodes)
        return cls(f"{module_file(own.path)}:{own.line}", text, names)


def module_file(path: Path) -> str:
    """A file's last two parts: enough to find it, and the same on every machine."""
    return "/".join(path.parts[-2:])


def _reachable(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    """A function of a module and what it uses of the module's functions and classes, in the order of the file."""
    table = {node.name: node for node in body if isinstance(node, (*Function, ast.ClassDef))}
    wanted, found = [name], set[str]()
    while wanted:
        current = wanted.pop()
        if current in found or current not in table:
            continue
        found.add(current)
        wanted += [node.id for node in ast.walk(table[current]) if isinstance(node, ast.Name)]
    return [node for key, node in table.items() if key in found]
