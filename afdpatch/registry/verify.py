"""Compares a lock with a source tree.

`check_entry` is the one comparison of the project: `verify` runs it over a whole lock, `PatchSet` before it changes
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afdpatch.registry.census import held_names, holders_of
from afdpatch.registry.errors import HELD, HELD_EXPECTED, HELD_TODO
from afdpatch.registry.identity import Identity
from afdpatch.registry.lock import Keeper, Lock, manifest_digest
from afdpatch.registry.manifest import Entry, Manifest
from afdpatch.registry.moved import Candidate, find_moved
from afdpatch.registry.report import EntryReport, Finding, Report, Verdict
from afdpatch.registry.source import SourceTree, Symbol, SymbolAbsent, SymbolMoved
from afdpatch.registry.unsound import why_unpatchable


def verify(
    lock: Lock,
    tree: SourceTree,
    identity: Identity,
    *,
    manifest: Manifest | None = None,
    probes: Mapping[str, bool | str] | None = None,
) -> Report:
    """Compares a whole lock with a source tree. Nothing of the package is imported.

    Args:
        lock: what was pinned.
        tree: the source to compare it with.
        identity: the tree's version and commit.
        manifest: the manifest as it is now, to see whether the lock is stale; None: not looked at.
        probes: what each entry's `remove_when` gave: true, false, or an error's text.
    """
    from afdpatch.registry.keepers import keepers_of  # a reader of source: the run path doesn't need it

    changed = tuple(file for file, pinned in sorted(lock.files.items()) if tree.sha256(file) != pinned)
    findings = [*_version_findings(lock, identity, tree, changed), *_stale(lock, manifest)]
    entries = []
    for entry in lock.manifest.entries:
        found, here = check_entry(entry, lock, tree)
        holders = holders_of(tree, entry.target) if entry.target in lock.holders else ()
        found += _new_holders(entry, lock, tree, holders)
        if entry.patches_target and entry.target in here:
            kind = here[entry.target].kind
            found += _unpatchable(entry, here[entry.target], tree)
            found += _keepers(entry, lock, keepers_of(tree, entry.target, kind, holders))
        found += _lacking(entry)
        found += _probe_findings(entry, (probes or {}).get(entry.id, False))
        symbol = here.get(entry.target, lock.symbols[entry.target])
        entries.append(EntryReport(entry=entry, file=symbol.file, line=symbol.line, findings=tuple(found)))
    return Report(
        lock=lock,
        source=tree.label,
        identity=identity,
        changed_files=changed,
        findings=tuple(findings),
        entries=tuple(entries),
    )


def check_entry(
    entry: Entry, lock: Lock, tree: SourceTree, *, trust_hashes: bool = False
) -> tuple[list[Finding], dict[str, Symbol]]:
    """Compares an entry's target, relied-on symbols and holders with the lock.

    Args:
        entry: an entry of the lock.
        lock: what was pinned.
        tree: the source to compare it with.
        trust_hashes: take a symbol as unchanged, without parsing, if all files it was found through are unchanged.

    Returns:
        What differs, and the symbols as they are in the tree, by name.
    """
    findings: list[Finding] = []
    here: dict[str, Symbol] = {}
    for name in entry.symbols:
        pinned = lock.symbols[name]
        if trust_hashes and all(tree.sha256(file) == lock.files.get(file) for file in pinned.files):
            here[name] = pinned
            continue
        try:
            here[name] = tree.resolve(name)
        except SymbolAbsent as error:
            # A whole search is worth its time for people, not for a process that fails anyway.
            moved = () if trust_hashes or isinstance(error, SymbolMoved) else find_moved(tree, pinned)
            findings.append(_absent(name, pinned, error, moved))
            continue
        findings += _compare(name, pinned, here[name], "target" if name == entry.target else "relied-on symbol")
    for holder in entry.holders:
        findings += _check_holder(entry, holder, lock, tree, trust_hashes)
    if trust_hashes:
        findings += _held(entry, lock.keepers.get(entry.target, ()))
    return findings, here


def _absent(name: str, pinned: Symbol, error: SymbolAbsent, moved: Sequence[Candidate]) -> Finding:
    todo = "find what became of it and port the patch, then `afdpatch pin`"
    if moved:
        todo = f"see whether it went to {' or '.join(map(str, moved))}; port the patch, then `afdpatch pin`"
    if isinstance(error, SymbolMoved):
        todo = f"read what changed, write {error.definition} in the manifest, then `afdpatch pin`"
    return Finding(
        verdict=Verdict.ABSENT,
        message="absent",
        expected=f"{pinned.kind} at {pinned.file}:{pinned.line}",
        found=str(error),
        todo=todo,
        symbol=name,
        file=pinned.file,
        line=pinned.line,
    )


def _compare(name: str, pinned: Symbol, here: Symbol, what: str) -> list[Finding]:
    todo = "compare the two releases there and port the patch if need be, then `afdpatch pin`"
    findings = []
    for part in ("interface", "body"):
        expected, found = getattr(pinned, part), getattr(here, part)
        if expected != found:
            findings.append(
                Finding(
                    verdict=Verdict.DRIFTED,
                    message=f"the {part} of the {what} changed",
                    expected=f"{part} {expected[:12]} of {pinned.defined_as} ({pinned.file}:{pinned.line})",
                    found=f"{part} {found[:12]} of {here.defined_as} ({here.file}:{here.line})",
                    todo=todo,
                    symbol=name,
                    file=here.file,
                    line=here.line,
                )
            )
    return findings


def _check_holder(entry: Entry, holder: str, lock: Lock, tree: SourceTree, trust_hashes: bool) -> list[Finding]:
    source = tree.file(holder)
    expected = f"from {entry.module} import {entry.qualname}"
    todo = "correct the entry's holders, then `afdpatch pin`"
    if source is None:
        return [Finding(Verdict.ABSENT, "the holder is absent", expected, "no such module", todo, symbol=holder)]
    if trust_hashes and lock.files.get(source.file) == source.sha256:
        return []
    if held_names(tree, holder, entry.target):
        return []
    found = f"no such import in {source.file}" if source.parses else f"{source.file} cannot be parsed"
    message = "the holder no longer holds the target"
    return [Finding(Verdict.DRIFTED, message, expected, found, todo, symbol=holder, file=source.file, line=1)]


def _new_holders(entry: Entry, lock: Lock, tree: SourceTree, holders: Sequence[str]) -> list[Finding]:
    """The modules that hold a patched function in a tree and didn't when it was pinned."""
    findings = []
    for name in (name for name in holders if name not in lock.holders[entry.target]):
        source = tree.file(name)
        findings.append(
            Finding(
                verdict=Verdict.DRIFTED,
                message="a module holds the target that didn't",
                expected=f"held by {', '.join(lock.holders[entry.target]) or 'no module'}",
                found=f"{name} imports it too, and would keep the original",
                todo="add it to the entry's holders, then `afdpatch pin`",
                symbol=name,
                file=source.file if source is not None else None,
                line=1,
            )
        )
    return findings


def _keepers(entry: Entry, lock: Lock, found: Sequence[Keeper]) -> list[Finding]:
    """Who keeps the original in a tree: those in the way, and those that the lock doesn't know."""
    findings = _held(entry, found)
    known = {keeper.identity for keeper in lock.keepers.get(entry.target, ())}
    for keeper in found:
        if keeper.kind != "import" and keeper.identity not in known and not keeper.in_the_way(entry):
            what = {"override": "overrides the target", "subclass": "is a subclass of the target"}
            findings.append(
                Finding(
                    verdict=Verdict.DRIFTED,
                    message="somebody keeps or overrides the target that didn't",
                    expected=f"{len(known)} that were pinned" if known else "nobody",
                    found=f"{keeper.where} {what.get(keeper.kind, 'may keep the original')}",
                    todo="see whether the patch must reach it too, then `afdpatch pin`",
                    symbol=entry.target,
                    file=keeper.file,
                    line=keeper.line,
                )
            )
    return findings


def _held(entry: Entry, found: Sequence[Keeper]) -> list[Finding]:
    """What would go on using the original, as one finding; its words are those of the search at run time."""
    left = [keeper for keeper in found if keeper.in_the_way(entry)]
    if not entry.patches_target or not left:
        return []
    shown = ", ".join(map(str, left[:8])) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
    return [
        Finding(
            verdict=Verdict.HELD,
            message=HELD,
            expected=HELD_EXPECTED,
            found=shown,
            todo=HELD_TODO,
            symbol=entry.target,
            file=left[0].file,
            line=left[0].line,
        )
    ]


def _unpatchable(entry: Entry, symbol: Symbol, tree: SourceTree) -> list[Finding]:
    reason = why_unpatchable(tree, symbol)
    if reason is None:
        return []
    return [
        Finding(
            verdict=Verdict.UNPATCHABLE,
            message="it can't be patched soundly",
            expected="a function, a static or class method, a property, a class or a value",
            found=reason,
            todo="patch what calls it, or what it calls",
            symbol=entry.target,
            file=symbol.file,
            line=symbol.line,
        )
    ]


def _lacking(entry: Entry) -> list[Finding]:
    """Functions of ours that an entry names and that aren't there."""
    from afdpatch.registry.ours import lacking  # a reader of source too

    return [
        Finding(
            verdict=Verdict.UNPATCHABLE,
            message=f"its {key} is absent",
            expected=name,
            found=reason,
            todo=f"write it, or correct {key} in the manifest, then `afdpatch pin`",
            symbol=name,
        )
        for key in ("replacement", "remove_when", "probe")
        if (name := getattr(entry, key)) is not None and (reason := lacking(name)) is not None
    ]


def _version_findings(lock: Lock, identity: Identity, tree: SourceTree, changed: tuple[str, ...]) -> list[Finding]:
    manifest = lock.manifest
    if not identity.versions and identity.commit is None and not changed:
        return []  # A checkout without _version.py: its files say which release it is.
    commit_differs = identity.has_commit(manifest.commit) is False
    if identity.is_release(manifest.version, manifest.commit):
        return []
    found = f"{identity}, commit {identity.commit}" if commit_differs else str(identity)
    return [
        Finding(
            verdict=Verdict.OTHER_VERSION,
            message=f"{tree.label}: another release than the pinned one",
            expected=f"{manifest.package} {manifest.version} at commit {manifest.commit}",
            found=found,
            todo=f"install {manifest.package} {manifest.version}, or port the manifest, then `afdpatch pin`",
        )
    ]


def _stale(lock: Lock, manifest: Manifest | None) -> list[Finding]:
    if manifest is None or manifest_digest(manifest) == lock.digest:
        return []
    now = {entry.id: entry for entry in manifest.entries}
    then = {entry.id: entry for entry in lock.manifest.entries}
    differ = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    return [
        Finding(
            verdict=Verdict.STALE_LOCK,
            message="the manifest was edited after the lock was made",
            expected=f"manifest {lock.digest[:12]}",
            found=f"manifest {manifest_digest(manifest)[:12]}; differing: {', '.join(differ) or 'header or order'}",
            todo="run `afdpatch pin` and commit the lock with the manifest",
        )
    ]


def _probe_findings(entry: Entry, outcome: bool | str) -> list[Finding]:
    if outcome is False:
        return []
    verdict = Verdict.OBSOLETE if outcome is True else Verdict.PROBE_FAILED
    kind = str(outcome).partition(": ")[0]
    what, asked = {
        "torch.compile": ("the probe under torch.compile", entry.replacement),
        "probe": ("its own probe", entry.probe),
    }.get(kind, ("the probe of its remove_when", entry.remove_when))
    return [
        Finding(
            verdict=verdict,
            message="the reason for the patch is gone" if outcome is True else f"{what} failed",
            expected="true" if kind == "probe" else "false",
            found="true" if outcome is True else str(outcome),
            todo="remove the entry and its code, then `afdpatch pin`" if outcome is True else f"run {asked}",
            symbol=asked,
        )
    ]
