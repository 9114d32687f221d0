"""Where a manifest says what: the lines of its YAML, for reports that point at them. Not read on the run path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from afdpatch.registry.report import Finding, Verdict
from afdpatch.registry.yamls import compose

if TYPE_CHECKING:
    import yaml

_HEADER_KEYS = {Verdict.OTHER_VERSION: "version", Verdict.STALE_LOCK: "patches"}


@dataclass(frozen=True)
class Marks:
    """The lines of a manifest, counted from 1.

    Attributes:
        path: the manifest.
        header: each key of the header.
        entries: by an entry's id: `""` is its first line; further each of its keys, and each text in it (a target, a
            relied-on symbol, a holder) that stands on a line.
    """

    path: Path
    header: Mapping[str, int]
    entries: Mapping[str, Mapping[str, int]]

    @classmethod
    def read(cls, path: Path) -> Marks:
        """Reads the lines of a manifest that `Manifest.read` takes; what isn't understood is left out."""
        import yaml

        root = compose(path.read_text(encoding="utf-8"))
        header: dict[str, int] = {}
        entries: dict[str, dict[str, int]] = {}
        for key, value in _pairs(root):
            header[key.value] = key.start_mark.line + 1
            if key.value == "patches" and isinstance(value, yaml.SequenceNode):
                for node in value.value:
                    lines = _entry(node)
                    entries[next((v.value for k, v in _pairs(node) if k.value == "id"), "")] = lines
        return cls(path=path, header=header, entries=entries)

    def line(self, entry_id: str | None = None, name: str | None = None) -> int:
        """The line to look at.

        Args:
            entry_id: an entry; None for the header.
            name: a key or a text in it; where there is no such thing, the entry's first line counts.
        """
        if entry_id is None:
            return self.header.get(name or "", 1)
        lines = self.entries.get(entry_id)
        if lines is None:
            return self.header.get("patches", 1)
        return lines.get(name or "", lines[""])

    def of(self, entry_id: str | None, finding: Finding) -> int:
        """The line that a finding is about: the very symbol's where it is written, else its entry's first."""
        if entry_id is None:
            return self.line(None, _HEADER_KEYS.get(finding.verdict))
        return self.line(entry_id, finding.symbol)

    @property
    def name(self) -> str:
        """The manifest's path as annotations want it: from the root of its repository, else from here, with slashes."""
        path = self.path.resolve()
        roots = [folder for folder in path.parents if (folder / ".git").exists()][:1]
        for root in [*roots, Path(os.getcwd()).resolve()]:
            if path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        return path.as_posix()


def _pairs(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        yield from ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))


def _entry(node: yaml.Node) -> dict[str, int]:
    import yaml

    lines = {"": node.start_mark.line + 1}
    for key, value in _pairs(node):
        lines.setdefault(key.value, key.start_mark.line + 1)
        for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(item, yaml.ScalarNode):
                lines.setdefault(item.value, item.start_mark.line + 1)
    return lines
