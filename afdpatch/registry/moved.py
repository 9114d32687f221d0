"""Where a symbol that is gone may have gone to: the same body elsewhere, or the same name elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from afdpatch.registry import fingerprint
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent, module_of

MOST_PARSED = 40
"""How many files are parsed in one search, at most; those that stand nearest to the old place come first."""

LEAST_WORDS = 3
"""A body with fewer long identifiers than this is found under its old name only: it may be there by chance."""


class Likeness(str, Enum):
    """What a candidate has in common with what is gone; the first is the most."""

    SAME = "same name and same body"
    """It moved."""

    BODY = "same body"
    """It was renamed."""

    NAME = "same qualified name"
    """It moved and was changed."""

    LAST = "same last name in the same file"
    """It may have been moved between classes and changed."""


@dataclass(frozen=True)
class Candidate:
    """A place where the symbol may be now.

    Attributes:
        symbol: `module:Qualified.name`.
        file: its file, from the directory that holds the package.
        line: its line.
        likeness: what it has in common with what is gone.
    """

    symbol: str
    file: str
    line: int
    likeness: Likeness

    def __str__(self) -> str:
        return f"{self.symbol} ({self.file}:{self.line}, {self.likeness.value})"


def find_moved(tree: SourceTree, pinned: Symbol, *, most: int = 3) -> tuple[Candidate, ...]:
    """Looks for a symbol that isn't where it was pinned.

    Every file is searched for the words of the symbol's body and for its definition's name; only hits are parsed.

    Args:
        tree: the source to search.
        pinned: the symbol as it was.
        most: how many candidates to name.

    Returns:
        The likeliest first. Empty if nothing is like it, and for values.
    """
    if pinned.kind == "value":
        return ()
    qualname = pinned.defined_as.partition(":")[2]
    names = qualname.split(".")
    words = [re.compile(rb"\b%s\b" % re.escape(word.encode())) for word in pinned.words]
    head = re.compile(rb"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+%s\b" % re.escape(names[0].encode()), re.MULTILINE)
    files = []
    for file, data in tree.contents:
        same_body = len(words) >= LEAST_WORDS and all(
            word.encode() in data and pattern.search(data) for word, pattern in zip(pinned.words, words, strict=True)
        )
        if same_body or file == pinned.file or (names[0].encode() in data and head.search(data)):
            files.append((not same_body, -_shared(file, pinned.file), file))
    found: list[tuple[int, int, Candidate]] = []
    order = list(Likeness)
    for _, near, file in sorted(files)[:MOST_PARSED]:
        source = tree.file(module_of(file))
        if source is None or source.file != file:
            continue
        for candidate in _candidates(source, pinned, qualname):
            if candidate.symbol != pinned.defined_as:
                found.append((order.index(candidate.likeness), near, candidate))
    found.sort(key=lambda item: (item[0], item[1], item[2].symbol))
    best = found[0][0] if found else 0
    return tuple(candidate for rank, _, candidate in found if rank <= max(best, 1))[:most]


def _candidates(source: SourceFile, pinned: Symbol, qualname: str) -> Iterator[Candidate]:
    last = qualname.rpartition(".")[2]
    comparable = len(pinned.words) >= LEAST_WORDS
    try:
        definitions = list(_definitions(source.tree.body, ""))
    except SymbolAbsent:
        return
    wanted = set(pinned.words)
    for name, node in definitions:
        if isinstance(node, ast.ClassDef) != (pinned.kind == "class"):
            continue
        same_last = name.rpartition(".")[2] == last
        likeness = None
        if (comparable or same_last) and wanted <= _identifiers(node) and fingerprint.body([node]) == pinned.body:
            likeness = Likeness.SAME if same_last else Likeness.BODY
            if not comparable and name != qualname:
                likeness = None
        elif name == qualname:
            likeness = Likeness.NAME
        if likeness is None and same_last and source.file == pinned.file:
            likeness = Likeness.LAST
        if likeness is not None:
            yield Candidate(f"{source.module}:{name}", source.file, node.lineno, likeness)


def _definitions(statements: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in statements:
        if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _definitions(getattr(node, field, []), prefix)
        for handler in getattr(node, "handlers", []):
            yield from _definitions(handler.body, prefix)


def _identifiers(node: ast.AST) -> set[str]:
    return set(fingerprint.words([node], count=1_000_000))


def _shared(one: str, other: str) -> int:
    """How many leading folders two paths share."""
    count = 0
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if left != right:
            break
        count += 1
    return count
