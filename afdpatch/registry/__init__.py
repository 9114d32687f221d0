"""The patch engine: manifest, fingerprints, lock, checks, transaction, reports. Knows no AFD, no torch and no vLLM.

docs/patches.md tells how patches are written, pinned, verified and removed.
"""

from afdpatch.registry.errors import (
    Conflict,
    LockError,
    ManifestError,
    NotInEffect,
    Obsolete,
    OtherVersion,
    PatchError,
    StaleLock,
    TargetAbsent,
    TargetDrifted,
    Unpatchable,
)
from afdpatch.registry.identity import Identity, identify
from afdpatch.registry.lock import Lock, lock_path
from afdpatch.registry.manifest import Entry, Manifest
from afdpatch.registry.packaged import packaged_manifest
from afdpatch.registry.patchset import PatchSet
from afdpatch.registry.report import EntryReport, Finding, Report, Verdict
from afdpatch.registry.source import SourceTree, Symbol
from afdpatch.registry.state import State
from afdpatch.registry.verify import check_entry, verify

__all__ = [
    "Conflict",
    "Entry",
    "EntryReport",
    "Finding",
    "Identity",
    "Lock",
    "LockError",
    "Manifest",
    "ManifestError",
    "NotInEffect",
    "Obsolete",
    "OtherVersion",
    "PatchError",
    "PatchSet",
    "Report",
    "SourceTree",
    "StaleLock",
    "State",
    "Symbol",
    "TargetAbsent",
    "TargetDrifted",
    "Unpatchable",
    "Verdict",
    "check_entry",
    "identify",
    "lock_path",
    "packaged_manifest",
    "verify",
]
