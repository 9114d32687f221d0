"""The manifest: which symbols of a package are changed, by what, when and why. Written by people, in YAML.

Parsing is apart from reading: `Manifest.parse` takes a mapping, which comes from YAML for `pin` and `verify` and from
the lock's JSON everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from afdpatch.registry.errors import ManifestError

KINDS = ("wrap", "replace", "install", "official")
WHENS = ("always", "role")
PATHS = ("cold", "hot", "traced")

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SYMBOL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFERENCE = re.compile(rf"{_ID.pattern}(/{_ID.pattern})?")
_REPOSITORY = re.compile(r"https://[^\s\"'<>]+[^\s\"'<>/]")


@dataclass(frozen=True)
class Entry:
    """One change, or one use of a place that the package offers (`kind: official`).

    Attributes:
        id: unique in the manifest; the seam's name first.
        seam: the group that the entry belongs to.
        target: `module:Qualified.name` of what is changed, in the module that defines it.
        kind: `wrap`, `replace`, `install` or `official`.
        why: the reason, for the reader of `afdpatch verify` and of a drift report.
        replacement: `module:name` of ours; none for `official`.
        when: `always` (in effect from `PatchSet.arm` on) or `role` (from `PatchSet.apply` on).
        roles: for `when: role`, the roles that use the entry.
        processes: the kinds of process that use the entry; empty: every one.
        path: how often it runs: `cold`, `hot` or `traced` (by torch.compile).
        holders: modules that hold the target by `from x import y`; rebound with it.
        relies: symbols that the replacement stands on: pinned, not patched.
        remove_when: `module:name` of a function; when it returns true, the entry is obsolete.
        probe: `module:name` of a function that `verify --probe` calls; true: the entry does what it should.
        since: the release of the manifest's own project that has the entry for the first time.
        after: entries that come first wherever both are used: an `id` of this manifest, or `manifest/id` of another,
            which may patch the same target.
        conflicts: entries that must never be in effect in one process with this one, named like those of `after`.
    """

    id: str
    seam: str
    target: str
    kind: str
    why: str
    replacement: str | None = None
    when: str = "role"
    roles: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    path: str = "cold"
    holders: tuple[str, ...] = ()
    relies: tuple[str, ...] = ()
    remove_when: str | None = None
    probe: str | None = None
    since: str | None = None
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The target's module."""
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        """The target's package."""
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def qualname(self) -> str:
        """The target's name in its module."""
        return self.target.partition(":")[2]

    @property
    def patches_target(self) -> bool:
        """Whether the target itself is given another value."""
        return self.kind in ("wrap", "replace")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The target, then the relied-on symbols."""
        return (self.target, *self.relies)

    def used_by(self, role: str, process: str) -> bool:
        """Whether a process of this role and kind uses the entry."""
        return (self.when == "always" or role in self.roles) and (not self.processes or process in self.processes)

    def meets(self, other: Entry) -> bool:
        """Whether there is a process that uses both entries."""
        roles = self.when == "always" or other.when == "always" or bool(set(self.roles) & set(other.roles))
        processes = not self.processes or not other.processes or bool(set(self.processes) & set(other.processes))
        return roles and processes


_ENTRY_KEYS = tuple(field.name for field in fields(Entry))
_ENTRY_REQUIRED = ("id", "seam", "target", "kind", "when", "why")
_ENTRY_LISTS = ("roles", "processes", "holders", "relies", "after", "conflicts")
_HEADER_REQUIRED = ("manifest", "package", "distributions", "version", "commit", "patches")
_HEADER_KEYS = (*_HEADER_REQUIRED, "repository")
_OPTIONAL = ("repository", "probe", "since", "after", "conflicts")
"""Keys that the frozen form has only where the manifest gives them."""


@dataclass(frozen=True)
class Manifest:
    """A manifest's header and entries.

    Attributes:
        name: the manifest's name (key `manifest`).
        package: the package that is patched.
        distributions: the names under which the package is distributed.
        version: the one release that the entries are written for, without a local part.
        commit: that release's commit, 40 hexadecimal digits.
        entries: in the order of the file, which is the order of application.
        repository: where the package's commits can be read, for links in reports: `https://forge/owner/project`.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    version: str
    commit: str
    entries: tuple[Entry, ...]
    repository: str | None = None

    @classmethod
    def parse(cls, data: object, *, source: str) -> Manifest:
        """Checks a mapping and makes a manifest of it.

        Args:
            data: what the file holds.
            source: the file's name, for errors.

        Raises:
            ManifestError: with the file, the entry's id (or its number) and the key.
        """
        header = _mapping(data, f"{source}: the manifest")
        _keys(header, _HEADER_KEYS, _HEADER_REQUIRED, f"{source}: the manifest")
        where = f"{source}: the manifest's header"
        package = _text(header, "package", where, _MODULE)
        raw_entries = header["patches"]
        if not isinstance(raw_entries, list):
            raise ManifestError(f"{source}: key 'patches' is not a list", found=type(raw_entries).__name__)
        entries = tuple(_entry(raw, index, package, source) for index, raw in enumerate(raw_entries))
        name = _text(header, "manifest", where, _ID)
        _no_clash(entries, source)
        _check_order(entries, name, source)
        return cls(
            name=name,
            package=package,
            distributions=_texts(header, "distributions", where, allow_empty=False),
            version=_text(header, "version", where, _VERSION),
            commit=_text(header, "commit", where, _COMMIT),
            entries=entries,
            repository=_text(header, "repository", where, _REPOSITORY) if "repository" in header else None,
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Reads a YAML manifest.

        Raises:
            ManifestError: there is no such file, it isn't YAML, or it isn't a valid manifest.
        """
        import yaml

        from afdpatch.registry.yamls import load

        try:
            data = load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ManifestError(f"{path}: the manifest cannot be read", found=str(error)) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ManifestError(f"{path}: the manifest is not YAML", found=str(error)) from error
        return cls.parse(data, source=str(path))

    def as_dict(self) -> dict[str, Any]:
        """The manifest as plain data with every key of every entry: the form that is frozen and hashed."""
        entries = [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in asdict(entry).items()
                if key not in _OPTIONAL or value
            }
            for entry in self.entries
        ]
        frozen: dict[str, Any] = {
            "manifest": self.name,
            "package": self.package,
            "distributions": list(self.distributions),
            "version": self.version,
            "commit": self.commit,
            "patches": entries,
        }
        return frozen if self.repository is None else {**frozen, "repository": self.repository}


def _entry(raw: object, index: int, package: str, source: str) -> Entry:
    name = raw.get("id") if isinstance(raw, Mapping) else None
    where = f"{source}: entry {name!r}" if isinstance(name, str) else f"{source}: entry number {index + 1}"
    data = {key: value for key, value in _mapping(raw, where).items() if value is not None}
    _keys(data, _ENTRY_KEYS, _ENTRY_REQUIRED, where)
    values: dict[str, Any] = {key: _texts(data, key, where) for key in _ENTRY_LISTS if key in data}
    values |= {key: _text(data, key, where) for key in _ENTRY_KEYS if key in data and key not in _ENTRY_LISTS}
    entry = Entry(**values)

    _match(entry.id, _ID, "id", where)
    for key, value, allowed in (("kind", entry.kind, KINDS), ("when", entry.when, WHENS), ("path", entry.path, PATHS)):
        if value not in allowed:
            raise ManifestError(f"{where}: bad {key}", expected=" | ".join(allowed), found=repr(value))
    for key, symbols in (
        ("target", (entry.target,)),
        ("relies", entry.relies),
        ("replacement", () if entry.replacement is None else (entry.replacement,)),
        ("remove_when", () if entry.remove_when is None else (entry.remove_when,)),
        ("probe", () if entry.probe is None else (entry.probe,)),
    ):
        for symbol in symbols:
            _match(symbol, _SYMBOL, key, where, expected="module:Qualified.name")
    for key, references in (("after", entry.after), ("conflicts", entry.conflicts)):
        for reference in references:
            _match(reference, _REFERENCE, key, where, expected="an entry's id, or manifest/id")
    for holder in entry.holders:
        _match(holder, _MODULE, "holders", where, expected="a module's name")
    for name in (*entry.symbols, *entry.holders):
        if name.partition(":")[0].partition(".")[0] != package:
            raise ManifestError(f"{where}: {name} is outside of the package", expected=f"a name under {package}")
    if (entry.replacement is None) != (entry.kind == "official"):
        expected = "no replacement" if entry.kind == "official" else "a replacement"
        raise ManifestError(f"{where}: kind {entry.kind!r} and its replacement", expected=expected)
    if (entry.when == "role") != bool(entry.roles):
        expected = "at least one role" if entry.when == "role" else "no roles"
        raise ManifestError(f"{where}: when {entry.when!r} and its roles", expected=expected, found=str(entry.roles))
    if entry.holders and (not entry.patches_target or "." in entry.qualname):
        raise ManifestError(f"{where}: only a patched function of a module has holders", found=f"target {entry.target}")
    return entry


def _no_clash(entries: Iterable[Entry], source: str) -> None:
    seen: dict[str, Entry] = {}
    owners: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.id in seen:
            raise ManifestError(f"{source}: entry {entry.id!r}: its id is used twice", todo="give it another id")
        seen[entry.id] = entry
        if not entry.patches_target:
            continue
        for other in owners.setdefault(entry.target, []):
            apart = entry.when == other.when == "role" and not set(entry.roles) & set(other.roles)
            if not apart:
                raise ManifestError(
                    f"{source}: entries {other.id!r} and {entry.id!r} both patch {entry.target}",
                    todo="make one entry of them, or give them roles that never meet",
                )
        owners[entry.target].append(entry)


def _check_order(entries: Iterable[Entry], name: str, source: str) -> None:
    """Own entries named in `after` stand earlier in the file; those named in `conflicts` never meet."""
    known = {entry.id: entry for entry in entries}
    before: set[str] = set()
    for entry in known.values():
        where = f"{source}: entry {entry.id!r}"
        for key, references in (("after", entry.after), ("conflicts", entry.conflicts)):
            for reference in references:
                manifest, _, other = reference.rpartition("/")
                if manifest not in ("", name):
                    continue
                if other not in known or other == entry.id:
                    raise ManifestError(
                        f"{where}: {key} names {reference!r}", expected="another entry of this manifest"
                    )
                if key == "after" and other not in before:
                    raise ManifestError(
                        f"{where}: comes before {other!r}, which its `after` names",
                        todo="the order of the file is the order of application: move it down",
                    )
                if key == "conflicts" and entry.meets(known[other]):
                    raise ManifestError(
                        f"{where}: conflicts with {other!r}, and there are processes that use both",
                        todo="give them roles or processes that never meet",
                    )
        before.add(entry.id)


def _mapping(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ManifestError(f"{where} is not a mapping of names to values", found=type(data).__name__)
    return data


def _keys(data: Mapping[str, Any], allowed: Iterable[str], required: Iterable[str], where: str) -> None:
    unknown = sorted(set(data) - set(allowed))
    if unknown:
        raise ManifestError(f"{where}: unknown key {unknown[0]!r}", expected=", ".join(allowed))
    for key in required:
        if key not in data:
            raise ManifestError(f"{where}: key {key!r} is missing")


def _match(value: str, pattern: re.Pattern[str], key: str, where: str, expected: str | None = None) -> None:
    if not pattern.fullmatch(value):
        raise ManifestError(f"{where}: bad {key}", expected=expected or f"a match of {pattern.pattern}", found=value)


def _text(data: Mapping[str, Any], key: str, where: str, pattern: re.Pattern[str] | None = None) -> str:
    value = data[key]
    if not isinstance(value, str) or not value.strip():
        todo = "quote it" if isinstance(value, (int, float)) else None
        raise ManifestError(f"{where}: bad {key}", expected="text that is not empty", found=repr(value), todo=todo)
    if pattern is not None:
        _match(value, pattern, key, where)
    return value.strip()


def _texts(data: Mapping[str, Any], key: str, where: str, *, allow_empty: bool = True) -> tuple[str, ...]:
    value = data[key]
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ManifestError(f"{where}: bad {key}", expected="a list of names", found=repr(value))
    if len(set(value)) != len(value):
        raise ManifestError(f"{where}: {key} names something twice", found=repr(value))
    if not value and not allow_empty:
        raise ManifestError(f"{where}: {key} is empty", expected="at least one name")
    return tuple(value)
