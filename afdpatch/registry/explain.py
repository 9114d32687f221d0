"""Everything that is known of one entry, put together as data for `afdpatch explain`."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from typing import Any

from afdpatch.registry.links import permalink, pinned_link
from afdpatch.registry.marks import Marks
from afdpatch.registry.ours import OwnCode, own_code
from afdpatch.registry.report import EntryReport, Finding, Report, Verdict
from afdpatch.registry.source import SourceTree, SymbolAbsent

FORMAT = 1


@dataclass(frozen=True)
class Reference:
    """A symbol or a module of the package that an entry names.

    Attributes:
        name: the symbol, or a holder's module.
        file: where it is in the source at hand; None if it is absent.
        line: its line there, if it has one.
        link: the symbol at the pinned commit, on the forge.
        verdict: the gravest of the findings about it.
    """

    name: str
    file: str | None
    line: int | None
    link: str | None
    verdict: Verdict

    @property
    def place(self) -> str:
        """`file:line` or `absent`."""
        if self.file is None:
            return "absent"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Explanation:
    """One entry.

    Attributes:
        report: its findings.
        declared: the manifest's `file:line`.
        target: what it changes or uses.
        relies: what it stands on.
        holders: the modules that are rebound with it.
        replacement: our function.
        removal: the function that tells when the entry is obsolete.
    """

    report: EntryReport
    declared: str
    target: Reference
    relies: tuple[Reference, ...]
    holders: tuple[Reference, ...]
    replacement: OwnCode | None
    removal: OwnCode | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        entry = self.report.entry
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(entry).items()}
        return {
            "format": FORMAT,
            **plain,
            "declared": self.declared,
            "verdict": self.report.verdict.value,
            "target": _reference(self.target),
            "relies": [_reference(item) for item in self.relies],
            "holders": [_reference(item) for item in self.holders],
            "replacement": _own(self.replacement),
            "remove_when": _own(self.removal),
            "findings": [finding.as_dict() for finding in self.report.findings],
        }


def explain(report: Report, entry_id: str, tree: SourceTree, marks: Marks) -> Explanation:
    """Puts together what is known of an entry.

    Args:
        report: the verdicts on the entry's lock in `tree`.
        entry_id: the entry.
        tree: the source at hand.
        marks: the manifest's lines.

    Raises:
        KeyError: the lock has no such entry.
    """
    own = next((item for item in report.entries if item.entry.id == entry_id), None)
    if own is None:
        raise KeyError(entry_id)
    entry = own.entry
    return Explanation(
        report=own,
        declared=f"{marks.name}:{marks.line(entry_id)}",
        target=_symbol(report, own, entry.target, tree),
        relies=tuple(_symbol(report, own, name, tree) for name in entry.relies),
        holders=tuple(_holder(report, own, name, tree) for name in entry.holders),
        replacement=own_code(entry.replacement) if entry.replacement else None,
        removal=own_code(entry.remove_when) if entry.remove_when else None,
    )


def _symbol(report: Report, own: EntryReport, name: str, tree: SourceTree) -> Reference:
    verdict = _verdict(own, name)
    file: str | None = None
    line: int | None = None
    try:
        pinned = report.lock.symbols[name]
        unchanged = all(tree.sha256(item) == report.lock.files.get(item) for item in pinned.files)
        here = pinned if unchanged else tree.resolve(name)
        file, line = here.file, here.line
    except SymbolAbsent:
        pass
    return Reference(name, file, line, pinned_link(report.lock, name), verdict)


def _holder(report: Report, own: EntryReport, name: str, tree: SourceTree) -> Reference:
    """A holder, with the line of its import."""
    source = tree.file(name)
    if source is None:
        return Reference(name, None, None, None, _verdict(own, name))
    lines = [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        and source.absolute(node) == own.entry.module
        and any(alias.name in (own.entry.qualname, "*") for alias in node.names)
    ]
    line = lines[0] if lines else None
    same = tree.sha256(source.file) == report.lock.files.get(source.file)
    link = permalink(report.lock.manifest, source.file, line if same else None)
    return Reference(name, source.file, line, link, _verdict(own, name))


def _verdict(own: EntryReport, name: str) -> Verdict:
    return Verdict.gravest(finding.verdict for finding in _about(own, name))


def _about(own: EntryReport, name: str) -> list[Finding]:
    return [finding for finding in own.findings if finding.symbol == name]


def _reference(item: Reference) -> dict[str, Any]:
    return {**vars(item), "verdict": item.verdict.value}


def _own(code: OwnCode | None) -> dict[str, Any] | None:
    return None if code is None else {**vars(code), "path": str(code.path) if code.path else None}
