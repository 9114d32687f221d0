"""The lock: a frozen manifest with the fingerprints of everything it stands on, in one release of the package.

`afdpatch pin` makes it from source; the run path reads only this file, which is JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from afdpatch.registry import fingerprint
from afdpatch.registry.census import held_names, holders_of
from afdpatch.registry.errors import LockError, ManifestError, OtherVersion, TargetAbsent
from afdpatch.registry.identity import identify
from afdpatch.registry.manifest import Entry, Manifest
from afdpatch.registry.source import SourceTree, Symbol, SymbolAbsent, SymbolMoved

FORMAT = 4
"""1: without `holders` and without the symbols' `words`. 2: without `keepers`. 3: other fingerprints."""


_SURE = frozenset({"import", "default", "name", "container", "wrapper", "attribute", "subclass"})


@dataclass(frozen=True)
class Keeper:
    """One place that keeps an original.

    Attributes:
        kind: `import` (by name), `default` (of a parameter), `name` (another one), `container`, `wrapper` (partial,
            staticmethod, cache …), `attribute` (set at import), `argument` (of a call that may keep it), `assignment`
            (to the target, by another module or past its own name), `override` (a subclass, an object or a holder has
            its own), `subclass` (of a class).
        where: it in words, as errors say it: what lies between, and the name that leads there.
        module: its module.
        file: its file, from the directory that holds the package.
        line: its line.
    """

    kind: str
    where: str
    module: str
    file: str
    line: int

    @property
    def sure(self) -> bool:
        """Whether it keeps the original for certain; an argument may be dropped, and an override is no use of it."""
        return self.kind in _SURE

    def in_the_way(self, entry: Entry) -> bool:
        """Whether a patch of the target would leave it behind.

        What the target's own module keeps, it keeps before any hook can come. Another module is imported before or
        after an entry for a role comes into effect, and nothing says which; entries with `when: always` come before.
        """
        if self.kind == "import" and self.module in entry.holders:
            return False  # rebound with the target
        if self.kind == "assignment":
            return True  # whichever comes last takes the other out of effect
        return self.sure and (entry.when == "role" or self.module == entry.module)

    @property
    def identity(self) -> tuple[str, str]:
        """What stays the same when lines move."""
        return (self.kind, self.where)

    def __str__(self) -> str:
        return f"{self.where} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Lock:
    """A manifest pinned to one release.

    Attributes:
        manifest: the frozen manifest.
        digest: the sha256 of the frozen manifest as canonical JSON; names the set everywhere.
        files: the sha256 of each file that a target, a relied-on symbol or a holder is in.
        symbols: what each target and relied-on symbol was, by the manifest's name for it.
        holders: for each patched function of a module, every module that held it; the manifest's are among them.
        keepers: for each patched target that has any, what else keeps the original, or overrides it.
    """

    manifest: Manifest
    digest: str
    files: Mapping[str, str]
    symbols: Mapping[str, Symbol]
    holders: Mapping[str, tuple[str, ...]]
    keepers: Mapping[str, tuple[Keeper, ...]] = field(default_factory=dict)

    @classmethod
    def make(cls, manifest: Manifest, tree: SourceTree, *, installed: bool = False) -> Lock:
        """Pins a manifest to a source tree.

        Args:
            manifest: what to pin.
            tree: the source of the release that the manifest names.
            installed: the tree is the installed package, whose distribution reports a version too.

        Raises:
            OtherVersion: the tree is another release, or reports another commit, than the manifest's header.
            TargetAbsent: a symbol or a holder isn't there.
            ManifestError: an entry's target can't be patched that way, or names a module that only imports it.
        """
        from afdpatch.registry.keepers import keepers_of  # a reader of source: the run path doesn't need it

        identity = identify(tree, manifest.distributions if installed else ())
        if not identity.is_release(manifest.version, manifest.commit):
            commit = f" at commit {identity.commit}" if identity.commit else ""
            raise OtherVersion(
                f"{tree.label} is not the release of the manifest's header",
                expected=f"{manifest.package} {manifest.version} at commit {manifest.commit}",
                found=f"{identity}{commit}",
                todo="pin from that release, or set version and commit in the manifest's header to port it",
            )
        files: dict[str, str] = {}
        symbols: dict[str, Symbol] = {}
        for entry in manifest.entries:
            for name in entry.symbols:
                symbol = _resolve(entry, name, tree)
                symbols[name] = replace(symbol, words=fingerprint.words(tree.nodes(name)[1]))
                files |= {file: tree.sha256(file) or "" for file in symbol.files}
            _check_kind(entry, symbols[entry.target])
            for holder in entry.holders:
                _check_holder(entry, holder, tree)
        holders = census(manifest, tree)
        keepers: dict[str, tuple[Keeper, ...]] = {}
        for entry in manifest.entries:
            if entry.patches_target:
                kind = symbols[entry.target].kind
                found = keepers_of(tree, entry.target, kind, holders.get(entry.target, ()))
                found = tuple(item for item in found if item.kind != "import" or item.module not in entry.holders)
                keepers |= {entry.target: found} if found else {}
        modules = {name for names in holders.values() for name in names}
        for name in sorted(modules | {keeper.module for found in keepers.values() for keeper in found}):
            source = tree.file(name)
            if source is not None:
                files[source.file] = source.sha256
        return cls(manifest, manifest_digest(manifest), files, symbols, holders, keepers)

    @classmethod
    def parse(cls, text: str, *, source: str) -> Lock:
        """Reads a lock's text.

        Args:
            text: JSON as `to_json` writes it.
            source: the file's name, for errors.

        Raises:
            LockError: it is no lock, it is of another format, or its frozen manifest was edited by hand.
        """
        todo = "make it again with `afdpatch pin`"
        try:
            data = json.loads(text)
            if data.get("kind") == "release":
                raise OtherVersion(
                    f"{source}: a record of another release, with which nothing is served",
                    expected=f"a lock, made for the manifest's own release {data['manifest_version']}",
                    found=f"a record of {data['version']}",
                    todo="keep such records in the folder locks/releases, or port the manifest, then `afdpatch pin`",
                )
            if data["format"] != FORMAT:
                raise LockError(f"{source}: another format", expected=str(FORMAT), found=str(data["format"]), todo=todo)
            manifest = Manifest.parse(data["manifest"], source=source)
            symbols = {name: symbol_of(name, value) for name, value in data["symbols"].items()}
            holders = {name: _texts(modules) for name, modules in data["holders"].items()}
            keepers = {
                name: tuple(Keeper(**_checked(Keeper, item)) for item in found)
                for name, found in data["keepers"].items()
            }
            _texts([*data["files"].values()])
            lock = cls(manifest, data["digest"], dict(data["files"]), symbols, holders, keepers)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ManifestError) as error:
            raise LockError(f"{source}: not a lock", found=f"{type(error).__name__}: {error}", todo=todo) from error
        missing = [name for entry in manifest.entries for name in entry.symbols if name not in symbols]
        if missing:
            raise LockError(f"{source}: no fingerprints of {missing[0]}", todo=todo)
        actual = manifest_digest(manifest)
        if actual != lock.digest:
            raise LockError(f"{source}: edited by hand", expected=lock.digest, found=actual, todo=todo)
        return lock

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Reads a lock's file.

        Raises:
            LockError: as `parse`, or the file cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LockError(f"{path}: the lock cannot be read", found=str(error), todo="run `afdpatch pin`") from error
        return cls.parse(text, source=str(path))

    def to_json(self) -> str:
        """The lock's text: indented, sorted, with a newline at the end."""
        data = {
            "format": FORMAT,
            "package": self.manifest.package,
            "version": self.manifest.version,
            "commit": self.manifest.commit,
            "digest": self.digest,
            "manifest": self.manifest.as_dict(),
            "files": dict(self.files),
            "symbols": {name: symbol_data(symbol) for name, symbol in self.symbols.items()},
            "holders": {name: list(modules) for name, modules in self.holders.items()},
            "keepers": {name: [asdict(keeper) for keeper in found] for name, found in self.keepers.items()},
        }
        return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def manifest_digest(manifest: Manifest) -> str:
    """The sha256 of a manifest's canonical JSON."""
    text = json.dumps(manifest.as_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def lock_path(manifest: Path, version: str) -> Path:
    """Where the lock of a manifest's file for a release is."""
    return manifest.parent / "locks" / f"{version}.json"


def census(manifest: Manifest, tree: SourceTree) -> dict[str, tuple[str, ...]]:
    """For each function of a module that the manifest patches, the modules that hold it."""
    targets = [entry.target for entry in manifest.entries if entry.patches_target and "." not in entry.qualname]
    return {target: holders_of(tree, target) for target in dict.fromkeys(targets)}


def symbol_data(symbol: Symbol) -> dict[str, Any]:
    """A symbol as a lock writes it, under its name."""
    return {key: value for key, value in asdict(symbol).items() if key != "name"}


def symbol_of(name: str, data: Mapping[str, Any]) -> Symbol:
    """The inverse of `symbol_data`."""
    lists = {"files": _texts(data["files"]), "words": _texts(data["words"])}
    return Symbol(**_checked(Symbol, {**data, **lists, "name": name}))


def _checked(kind: type[Symbol | Keeper], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Data for a dataclass, of which the fields of texts and numbers have such."""
    wanted = {"str": str, "int": int}
    for item in fields(kind):
        if item.type in wanted and not isinstance(data[item.name], wanted[str(item.type)]):
            raise TypeError(f"{item.name} is {data[item.name]!r}")
    return data


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is no list of texts")
    return tuple(value)


def _check_holder(entry: Entry, holder: str, tree: SourceTree) -> None:
    source = tree.file(holder)
    if source is None or not held_names(tree, holder, entry.target):
        raise TargetAbsent(
            "the holder doesn't hold the target",
            patch_id=entry.id,
            symbol=holder,
            expected=f"from {entry.module} import {entry.qualname}",
            found="no such import" if source else "no such module",
            todo="correct the entry's holders",
        )


def _resolve(entry: Entry, name: str, tree: SourceTree) -> Symbol:
    try:
        return tree.resolve(name)
    except SymbolMoved as error:
        raise ManifestError(
            "the entry names a module that only imports the symbol",
            patch_id=entry.id,
            symbol=name,
            expected="the module that defines it",
            found=str(error),
            todo=f"write {error.definition}",
        ) from error
    except SymbolAbsent as error:
        raise TargetAbsent(
            "the symbol is absent", patch_id=entry.id, symbol=name, found=str(error), todo="correct the entry"
        ) from error


def _check_kind(entry: Entry, symbol: Symbol) -> None:
    allowed = ["function", "staticmethod", "classmethod", "property"]
    if entry.kind == "replace":
        allowed += ["class", "value"]
    if entry.patches_target and symbol.kind not in allowed:
        what = "functions and methods" if entry.kind == "wrap" else "what is named below"
        raise ManifestError(
            f"kind {entry.kind!r} patches {what} only",
            patch_id=entry.id,
            symbol=entry.target,
            expected=" | ".join(allowed),
            found=f"{symbol.kind} ({symbol.file}:{symbol.line})",
            todo="name a method of it",
        )
