"""Which release of a package is there, found without importing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afdpatch.registry.source import SourceTree, SymbolAbsent


@dataclass(frozen=True)
class Identity:
    """What a package says of itself.

    Attributes:
        versions: pairs of a version, as it was reported, and who reported it.
        commit: the commit that git or the package's `_version.py` reports, if any.
        commit_by: who reports the commit; empty if nobody does.
    """

    versions: tuple[tuple[str, str], ...]
    commit: str | None
    commit_by: str = ""

    @property
    def version(self) -> str | None:
        """The version without its local part (`+cpu`), if all that report one agree on it; else None."""
        bases = {base(version) for version, _ in self.versions}
        return bases.pop() if len(bases) == 1 else None

    def __str__(self) -> str:
        return ", ".join(f"{version} ({who})" for version, who in self.versions) or "no version reported"

    def has_commit(self, pinned: str) -> bool | None:
        """Whether the reported commit, which may be abbreviated, is the pinned one; None if none is reported."""
        if self.commit is None:
            return None
        reported = self.commit.lower().removeprefix("g")
        return len(reported) >= 7 and pinned.startswith(reported)

    def is_release(self, version: str, commit: str) -> bool:
        """Whether this is a manifest's release: its version, or if none is reported its commit, and no other commit."""
        same_commit = self.has_commit(commit)
        return same_commit is not False and (self.version == version or (not self.versions and same_commit is True))


def base(version: str) -> str:
    """A version without its local part."""
    return version.partition("+")[0]


def installed_versions(distributions: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The versions that the installed ones of some distributions report, each with the distribution's name."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in distributions:
        try:
            found.append((version(name), name))
        except PackageNotFoundError:
            continue
    return tuple(found)


def identify(tree: SourceTree, distributions: Iterable[str] = ()) -> Identity:
    """Reads the version and the commit of a source tree.

    Args:
        tree: the source. Its `_version.py` is read, not imported; of a wheel or an sdist also the metadata; of a git
            commit its name, which goes before what a `_version.py` in it says.
        distributions: for the installed package, the names it may be distributed under.
    """
    module = f"{tree.package}._version"
    try:
        constants = tree.constants(module)
    except SymbolAbsent:
        constants = {}
    file = f"{tree.package}/_version.py"
    versions = installed_versions(distributions)
    versions += tuple((version, f"{name}'s metadata") for name, version in tree.files.stated)
    stated = constants.get("__version__", constants.get("version"))
    if isinstance(stated, str):
        versions += ((stated, file),)
    if tree.files.commit is not None:
        return Identity(versions=versions, commit=tree.files.commit, commit_by="git")
    commit = constants.get("__commit_id__", constants.get("commit_id"))
    if isinstance(commit, str) and commit:
        return Identity(versions=versions, commit=commit, commit_by=file)
    return Identity(versions=versions, commit=None)
