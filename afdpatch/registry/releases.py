"""Records of other releases than the manifest's: what each symbol was there, for comparisons without their source.

Nothing is ever served with one: they are in the folder `releases` below the locks, where the run path doesn't look, and
`Lock.read` refuses them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afdpatch.registry.compat import Absence, TreeView
from afdpatch.registry.errors import LockError, OtherVersion
from afdpatch.registry.identity import Identity
from afdpatch.registry.lock import Keeper, Lock, census, manifest_digest, symbol_data, symbol_of
from afdpatch.registry.manifest import Manifest
from afdpatch.registry.source import SourceTree, Symbol

FORMAT = 3
"""1: without `holders` and without the symbols' `words`. 2: other fingerprints."""


@dataclass(frozen=True)
class Release:
    """What a release has of everything that a manifest stands on.

    Attributes:
        package: the package.
        version: the release's version.
        commit: its commit, which may be abbreviated; None if nobody reports it.
        established: how it is known that it is that release: `by`, `detail`, and of an archive `sha256`.
        manifest_version: the release that the manifest is written for.
        digest: the manifest's digest.
        symbols: what is there, by the manifest's name for it.
        absent: what isn't.
        held: for each patched function of a module, the modules that hold it.
    """

    package: str
    version: str
    commit: str | None
    established: Mapping[str, str]
    manifest_version: str
    digest: str
    symbols: Mapping[str, Symbol]
    absent: Mapping[str, Absence]
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def make(cls, manifest: Manifest, lock: Lock, tree: SourceTree, identity: Identity) -> Release:
        """Looks at a release with the eyes of a manifest.

        Args:
            manifest: what to look for.
            lock: its lock, which says what the symbols were: by that, those that moved are found.
            tree: the release's source.
            identity: its version and commit.

        Raises:
            OtherVersion: the source reports no version, or several.
            LockError: the lock is older than the manifest.
        """
        if identity.version is None:
            raise OtherVersion(f"{tree.label} doesn't say which release it is", found=str(identity))
        if manifest_digest(manifest) != lock.digest:
            raise LockError("the manifest was edited after its lock was made", todo="run `afdpatch pin` first")
        view = TreeView(tree)
        looked = {name: view.look(pinned) for name, pinned in lock.symbols.items()}
        return cls(
            package=manifest.package,
            version=identity.version,
            commit=identity.commit,
            established=_established(tree, identity),
            manifest_version=manifest.version,
            digest=lock.digest,
            symbols={name: found for name, found in looked.items() if isinstance(found, Symbol)},
            absent={name: found for name, found in looked.items() if isinstance(found, Absence)},
            held=census(manifest, tree),
        )

    @classmethod
    def of_lock(cls, lock: Lock) -> Release:
        """The manifest's own release, as its lock has it."""
        manifest = lock.manifest
        established = {"by": "manifest", "detail": "the manifest's header"}
        head = (manifest.package, manifest.version, manifest.commit, established, manifest.version, lock.digest)
        return cls(*head, symbols=lock.symbols, absent={}, held=lock.holders)

    @classmethod
    def read(cls, path: Path) -> Release:
        """Reads a record.

        Raises:
            LockError: it cannot be read, or is none.
        """
        todo = "make it again with `afdpatch pin --release`"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if (data["format"], data["kind"]) != (FORMAT, "release"):
                raise ValueError(f"format {data['format']}, kind {data['kind']}")
            return cls(
                package=data["package"],
                version=data["version"],
                commit=data["commit"],
                established=dict(data["established"]),
                manifest_version=data["manifest_version"],
                digest=data["digest"],
                symbols={name: symbol_of(name, value) for name, value in data["symbols"].items()},
                absent={name: Absence(**value) for name, value in data["absent"].items()},
                held={name: tuple(modules) for name, modules in data["holders"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LockError(f"{path}: not a record of a release", found=f"{error}", todo=todo) from error

    def to_json(self) -> str:
        """The record's text: indented, sorted, with a newline at the end; the same bytes each time."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "kind": "release",
            "package": self.package,
            "version": self.version,
            "commit": self.commit,
            "established": dict(self.established),
            "manifest_version": self.manifest_version,
            "digest": self.digest,
            "symbols": {name: symbol_data(symbol) for name, symbol in self.symbols.items()},
            "absent": {name: vars(absence) for name, absence in self.absent.items()},
            "holders": {name: list(modules) for name, modules in self.held.items()},
        }
        return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def look(self, pinned: Symbol) -> Symbol | Absence:
        """A pinned symbol as the release has it.

        Raises:
            LockError: the manifest got this symbol after the record was made.
        """
        found = self.symbols.get(pinned.name) or self.absent.get(pinned.name)
        if found is None:
            raise LockError(
                f"the record of {self.package} {self.version} doesn't have {pinned.name}",
                todo=f"run `afdpatch pin --release --source SRC` with the source of {self.version}",
            )
        return found

    def holders(self, target: str) -> tuple[str, ...]:
        """The modules that hold a patched function of a module."""
        return self.held.get(target, ())

    def keepers(self, target: Symbol, holders: tuple[str, ...]) -> tuple[Keeper, ...]:
        """None: a record has symbols and holders. `compat` with the release's source sees more."""
        return ()

    def unpatchable(self, target: Symbol) -> str | None:
        """None, likewise."""
        return None


def release_path(manifest: Path, version: str) -> Path:
    """Where the record of a release is, for a manifest's file."""
    return manifest.parent / "locks" / "releases" / f"{version}.json"


def records(manifest: Path) -> list[Path]:
    """All records beside a manifest's file, in the order of their versions."""
    paths = (manifest.parent / "locks" / "releases").glob("*.json")
    return sorted(paths, key=lambda path: version_key(path.stem))


def version_key(version: str) -> tuple[int, ...]:
    """A key that sorts versions by their numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _established(tree: SourceTree, identity: Identity) -> dict[str, str]:
    archive = tree.root if tree.root.is_file() else None
    result = {}
    if archive is not None:
        with archive.open("rb") as stream:
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
        result = {"archive": archive.name, "sha256": digest.hexdigest()}
    if identity.commit is not None:
        return result | {"by": "reported", "detail": f"{identity.commit_by} reports commit {identity.commit}"}
    if archive is not None:
        return result | {
            "by": "archive",
            "detail": f"no commit is reported; the archive's own hash stands for it; {identity}",
        }
    return {"by": "version", "detail": f"no commit is reported; {identity}"}
