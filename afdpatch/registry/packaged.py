"""Locks that come with an installed package of ours, found by the release of the package that they are for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from afdpatch.registry.errors import LockError, OtherVersion
from afdpatch.registry.identity import identify
from afdpatch.registry.lock import Lock
from afdpatch.registry.source import SourceTree


def packaged_manifest(package: str, name: str) -> Path:
    """The path of a packaged manifest, which need not exist."""
    # importlib.resources would do, and imports tempfile, zipfile and shutil for it.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LockError(f"there is no package {package!r} with the manifest {name!r}", todo="install it")
    return Path(next(iter(spec.submodule_search_locations))) / f"{name}.yaml"


def packaged_lock(package: str, name: str) -> Lock | None:
    """The lock of a packaged manifest for the installed release, or None if nothing of the kind is installed.

    Args:
        package: the package that has the folder `locks`.
        name: the manifest's name.

    Raises:
        LockError: there is no lock at all of that manifest, or one cannot be read.
        OtherVersion: the installed release, or the commit that it reports, has no lock.
    """
    folder = packaged_manifest(package, name).parent / "locks"
    locks = [lock for lock in map(Lock.read, sorted(folder.glob("*.json"))) if lock.manifest.name == name]
    if not locks:
        raise LockError(f"{folder} has no lock of the manifest {name!r}", todo="run `afdpatch pin`")
    target = locks[0].manifest.package
    if importlib.util.find_spec(target) is None:
        return None
    distributions = tuple(dict.fromkeys(name for lock in locks for name in lock.manifest.distributions))
    identity = identify(SourceTree.installed(target), distributions)
    for lock in locks:
        if lock.manifest.version == identity.version and identity.has_commit(lock.manifest.commit) is not False:
            return lock
    commit = f", commit {identity.commit}" if identity.commit else ""
    raise OtherVersion(
        f"the installed {target} is not a release that this afdpatch was made for",
        expected=" or ".join(f"{target} {lock.manifest.version} ({lock.manifest.commit[:12]})" for lock in locks),
        found=f"{identity}{commit}",
        todo=f"install one of those, or an afdpatch made for this {target}; `afdpatch verify` says what differs",
    )
