"""What a comparison of a lock with a source tree came to, as data. Showing it is the command's business."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from afdpatch.registry.errors import (
    NotInEffect,
    Obsolete,
    OtherVersion,
    PatchError,
    StaleLock,
    TargetAbsent,
    TargetDrifted,
    Unpatchable,
)
from afdpatch.registry.identity import Identity
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry

FORMAT = 1


class Verdict(str, Enum):
    """What a comparison came to. Of several, the gravest counts: the order is the one below, `OK` last."""

    OTHER_VERSION = "other-version"
    """The package is another release, or reports another commit, than the pinned one (or no version at all)."""

    ABSENT = "absent"
    """A target, a relied-on symbol or a holder isn't where it was pinned."""

    STALE_LOCK = "stale-lock"
    """The manifest was edited after the lock was made."""

    UNPATCHABLE = "unpatchable"
    """What the target is, in source, can't be patched soundly."""

    HELD = "held"
    """The original is kept by others, who would go on using it: a default argument, a table, a subclass."""

    DRIFTED = "drifted"
    """A target's or a relied-on symbol's body or interface changed, or a holder no longer holds its target."""

    OBSOLETE = "obsolete"
    """The entry's `remove_when` is true: the reason for the entry is gone."""

    PROBE_FAILED = "probe-failed"
    """The entry's `remove_when` could not be evaluated."""

    OK = "ok"
    """Everything is as it was pinned."""

    @property
    def meaning(self) -> str:
        """What the verdict says, in a sentence."""
        return _MEANINGS[self]

    @property
    def error(self) -> type[PatchError]:
        """The error that stands for this verdict at run time."""
        return _ERRORS[self]

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this verdict."""
        return 0 if self is Verdict.OK else self.error.exit_code

    @classmethod
    def gravest(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """The one that counts."""
        present = set(verdicts)
        return next((verdict for verdict in cls if verdict in present), cls.OK)


_ERRORS: dict[Verdict, type[PatchError]] = {
    Verdict.OTHER_VERSION: OtherVersion,
    Verdict.ABSENT: TargetAbsent,
    Verdict.STALE_LOCK: StaleLock,
    Verdict.UNPATCHABLE: Unpatchable,
    Verdict.HELD: NotInEffect,
    Verdict.DRIFTED: TargetDrifted,
    Verdict.OBSOLETE: Obsolete,
    Verdict.PROBE_FAILED: PatchError,
    Verdict.OK: PatchError,
}


_MEANINGS: dict[Verdict, str] = {
    Verdict.OTHER_VERSION: "The package is another release, or reports another commit, than the pinned one.",
    Verdict.ABSENT: "A target, a relied-on symbol or a holder isn't where it was pinned.",
    Verdict.STALE_LOCK: "The manifest was edited after the lock was made.",
    Verdict.UNPATCHABLE: "The target can't be patched soundly.",
    Verdict.HELD: "The original is kept by others, who would go on using it.",
    Verdict.DRIFTED: "A target or a relied-on symbol changed, or a holder no longer holds its target.",
    Verdict.OBSOLETE: "The reason for the patch is gone.",
    Verdict.PROBE_FAILED: "The function that tells whether the patch is still needed could not be evaluated.",
    Verdict.OK: "Everything is as it was pinned.",
}


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        verdict: its class.
        message: what is the matter, in a few words.
        expected: what was pinned.
        found: what is there.
        todo: what to do about it.
        symbol: the symbol or holder concerned; None for the whole set.
        file: the file to look at, from the directory that holds the package; None if there is none.
        line: the line in that file.
    """

    verdict: Verdict
    message: str
    expected: str
    found: str
    todo: str
    symbol: str | None = None
    file: str | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        """`file:line`, as far as known."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file or ""

    def as_error(self, patch_id: str | None) -> PatchError:
        """The finding as the error that it is at run time."""
        place = f" ({self.place})" if self.place else ""
        return self.verdict.error(
            f"{self.message}{place}",
            patch_id=patch_id,
            symbol=self.symbol,
            expected=self.expected,
            found=self.found,
            todo=self.todo,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**vars(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class EntryReport:
    """One entry's outcome.

    Attributes:
        entry: the entry as pinned.
        file: where its target is: in the tree if it was found there, else where it was pinned.
        line: the target's line.
        findings: what differs; empty if nothing does.
    """

    entry: Entry
    file: str
    line: int
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The gravest of the findings."""
        return Verdict.gravest(finding.verdict for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "id": self.entry.id,
            "seam": self.entry.seam,
            "kind": self.entry.kind,
            "target": self.entry.target,
            "file": self.file,
            "line": self.line,
            "verdict": self.verdict.value,
            "findings": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class Report:
    """The outcome of a whole lock against a whole tree.

    Attributes:
        lock: what was pinned.
        source: the directory that holds the package.
        identity: what the package reports of itself.
        changed_files: the pinned files whose hash differs or that are gone.
        findings: what concerns the whole set.
        entries: one report an entry, in the manifest's order.
    """

    lock: Lock
    source: str
    identity: Identity
    changed_files: tuple[str, ...]
    findings: tuple[Finding, ...]
    entries: tuple[EntryReport, ...]

    @property
    def verdict(self) -> Verdict:
        """The gravest of all findings."""
        own = [finding.verdict for finding in self.findings]
        return Verdict.gravest([*own, *(entry.verdict for entry in self.entries)])

    def all_findings(self) -> Iterator[tuple[str | None, Finding]]:
        """Every finding with its entry's id; those of the whole set come first, with None."""
        yield from ((None, finding) for finding in self.findings)
        for entry in self.entries:
            yield from ((entry.entry.id, finding) for finding in entry.findings)

    @property
    def summary(self) -> str:
        """How it ended, in a line."""
        failed = sum(entry.verdict is not Verdict.OK for entry in self.entries)
        counts = f"{len(self.entries)} entries, {failed} with findings"
        return f"{self.verdict.value}: {counts}; manifest {self.lock.digest[:12]}"

    @property
    def commit_by(self) -> str:
        """How the pinned commit was established: `reported`, `file-hashes`, or `none` if it was not."""
        if self.identity.commit is not None:
            return "reported" if self.identity.has_commit(self.lock.manifest.commit) else "none"
        return "none" if self.changed_files else "file-hashes"

    @property
    def commit_detail(self) -> str:
        """`commit_by` in words."""
        count = len(self.lock.files)
        if self.identity.commit is not None:
            return f"{self.identity.commit_by} reports {self.identity.commit}"
        if not self.changed_files:
            return f"no commit is reported; all {count} pinned files have the hashes pinned for it"
        more = f" and {len(self.changed_files) - 1} more" if len(self.changed_files) > 1 else ""
        changed = f"{len(self.changed_files)} of {count} pinned files differ"
        return f"no commit is reported; {changed}: {self.changed_files[0]}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: manifests/schemas/verify.json; `format` grows when the meaning of a key changes."""
        manifest = self.lock.manifest
        return {
            "format": FORMAT,
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "manifest": manifest.name,
            "digest": self.lock.digest,
            "package": manifest.package,
            "source": self.source,
            "version": {
                "pinned": manifest.version,
                "found": self.identity.version,
                "reported": [{"version": version, "by": who} for version, who in self.identity.versions],
            },
            "commit": {
                "pinned": manifest.commit,
                "reported": self.identity.commit,
                "established_by": self.commit_by,
                "detail": self.commit_detail,
                "changed_files": list(self.changed_files),
            },
            "findings": [finding.as_dict() for finding in self.findings],
            "entries": [entry.as_dict() for entry in self.entries],
        }
