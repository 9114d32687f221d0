"""Manifests of others: a package that declares one gets arming, verifying and listing for nothing.

It declares the package that has `<name>.yaml` and the folder `locks` in its metadata:

    [project.entry-points."afdpatch.manifests"]
    theirs = "their_plugin.manifests"

vLLM's plug-in hook of afdpatch then arms `theirs` in every process of vLLM; `patchset("theirs")` is its set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from afdpatch.registry.errors import Conflict, ManifestError
from afdpatch.registry.packaged import packaged_manifest
from afdpatch.registry.patchset import PatchSet

GROUP = "afdpatch.manifests"


@dataclass(frozen=True)
class Declared:
    """A manifest that an installed distribution declares.

    Attributes:
        name: the manifest's name; its file is `<name>.yaml`.
        package: the package that has the file and the folder `locks`.
        distribution: who declares it.
    """

    name: str
    package: str
    distribution: str

    @property
    def path(self) -> Path:
        """The manifest's file, which need not exist: the locks are enough at run time."""
        return packaged_manifest(self.package, self.name)


def declared() -> tuple[Declared, ...]:
    """The manifests that installed distributions declare, by name. Their packages are not imported.

    Raises:
        Conflict: two distributions declare manifests of one name.
    """
    from importlib.metadata import entry_points

    found: dict[str, Declared] = {}
    for point in entry_points(group=GROUP):
        distribution = point.dist.name if point.dist is not None else "an unknown distribution"
        item = Declared(point.name, point.value.strip(), distribution)
        other = found.setdefault(item.name, item)
        if other != item:
            raise Conflict(
                f"two manifests are called {item.name!r}",
                found=f"{other.package} of {other.distribution}, {item.package} of {item.distribution}",
                todo="uninstall one of them",
            )
    return tuple(found[name] for name in sorted(found))


def manifest_file(wanted: str) -> Path:
    """The manifest that a command's argument means: a file, or the name of a declared manifest.

    What is a file, ends in `.yaml` or `.yml`, or has a folder in it is a path. `afd` is afdpatch's own.

    Raises:
        ManifestError: no installed distribution declares a manifest of that name.
    """
    path = Path(wanted)
    if path.suffix in (".yaml", ".yml") or path.name != wanted or path.is_file():
        return path
    return packaged_manifest("afdpatch.manifests", "afd") if wanted == "afd" else _find(wanted).path


@cache
def _load(item: Declared) -> PatchSet:
    return PatchSet.load(item.package, item.name)


def patchset(name: str) -> PatchSet:
    """The one set of this process for a declared manifest.

    Raises:
        ManifestError: no installed distribution declares such a manifest.
    """
    return _load(_find(name))


def _find(name: str) -> Declared:
    found = declared()
    for item in found:
        if item.name == name:
            return item
    names = ", ".join(item.name for item in found) or "none"
    raise ManifestError(f"no manifest {name!r} is declared", expected=f"one of: {names}", todo="install its package")


def arm_declared() -> None:
    """Arms every declared manifest, those first that others come `after`.

    Raises:
        PatchError: the first failure; sets that come later are not armed then.
    """
    for found in in_order(_load(item) for item in declared()):
        found.arm()


def in_order(sets: Iterable[PatchSet]) -> list[PatchSet]:
    """Sets in the order that their entries' `after` asks for; of equals, as given.

    A set of which the package isn't installed is left out.

    Raises:
        Conflict: they ask to come after each other; all are named.
        PatchError: a lock can't be read, or there is none for the installed release.
    """
    waiting: dict[str, tuple[PatchSet, set[str]]] = {}
    for item in sets:
        if not item.installed:
            continue
        manifest = item.manifest
        references = {reference for entry in manifest.entries for reference in entry.after}
        waiting[manifest.name] = item, {name.partition("/")[0] for name in references if "/" in name} - {manifest.name}
    ordered = []
    while waiting:
        name = next((name for name, (_, after) in waiting.items() if not after & waiting.keys()), None)
        if name is None:
            raise Conflict("these manifests ask to come after each other", found=", ".join(waiting))
        ordered.append(waiting.pop(name)[0])
    return ordered
