"""A walk over a git history: the first commit that breaks each patch, in one pass, with nothing done twice.

The history is followed by first parents. A commit costs what it changes: git says which files, and only patches that
were found through one of them are looked at again. What a blob was parsed to is kept by the blob's name, and the
present commit's files stay in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from afdpatch.registry.census import STAR, held_names, holders_of
from afdpatch.registry.compat import Absence, Part, Standing, TreeView, compare
from afdpatch.registry.files import SourceError
from afdpatch.registry.gitfiles import LINK, GitFiles, GitRepository
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent, module_of

Changes = dict[str, str | None]
"""Paths from the repository's top, each with its new blob; None if there is none now. LINK if it is or was a link."""


@dataclass(frozen=True)
class Commit:
    """A commit of the history.

    Attributes:
        name: its full name.
        date: the committer's date, ISO 8601.
        subject: the first line of its message.
    """

    name: str
    date: str
    subject: str


@dataclass(frozen=True)
class Break:
    """The first commit after which a patch isn't as it was pinned.

    Attributes:
        entry_id: the patch.
        commit: the commit; None if the patch is whole to the end.
        parts: what broke there.
        at_start: the patch was broken at the good end already, and `commit` is that end.
        last: how the patch is at the bad end.
    """

    entry_id: str
    commit: Commit | None
    parts: tuple[Part, ...]
    at_start: bool
    last: Standing

    @property
    def standing(self) -> Standing:
        """How the patch was after that commit."""
        return Standing.worst(part.standing for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.entry_id,
            "standing": self.standing.value,
            "commit": vars(self.commit) if self.commit is not None else None,
            "at_start": self.at_start,
            "last": self.last.value,
            "parts": [vars(part) | {"standing": part.standing.value} for part in self.parts],
        }


@dataclass
class Counts:
    """What a walk did.

    Attributes:
        commits: the commits walked over, the good end included.
        looked: how often a symbol was looked up.
        blobs: how many different blobs were taken up for symbols; each is parsed once at most.
        searched: how many blobs were searched for new holders.
    """

    commits: int = 0
    looked: int = 0
    blobs: int = 0
    searched: int = 0


@dataclass
class _State:
    """What was found about one symbol, and the modules that it was found through."""

    found: Symbol | Absence
    modules: frozenset[str]


@dataclass
class _Census:
    """Who holds one target, and what that was found by.

    Attributes:
        held: the modules that hold it.
        names: the names under which they do, the target's own among them.
        asked: the modules that were read for it.
    """

    held: set[str]
    names: set[str]
    asked: set[str]

    def concerns(self, file: str, data: bytes) -> bool:
        """Whether a changed file may make a difference: it was read, or has one of the names or an `import *` now."""
        if module_of(file) in self.asked or STAR.search(data):
            return True
        found = [name for name in self.names if name.encode() in data]
        text = data.decode("utf-8", "replace") if found else ""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for name in found)


@dataclass
class Walk:
    """One walk.

    Attributes:
        lock: what was pinned.
        repository: where the history is.
        breaks: one a patch, in the manifest's order.
        start: where the walk began.
        left: that isn't the good end, but where its branch left the walked one.
        counts: what it took.
    """

    lock: Lock
    repository: GitRepository
    breaks: tuple[Break, ...] = ()
    start: Commit | None = None
    left: bool = False
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._parsed: dict[tuple[str, str | None], SourceFile] = {}
        self._results: dict[tuple[str, tuple[tuple[str, str | None, str | None], ...]], _State] = {}
        self._states: dict[str, _State] = {}
        self._held: dict[str, _Census] = {}

    def run(self, good: str, bad: str, step: Callable[[int, int, str], None] = lambda done, total, name: None) -> None:
        """Walks from the commit after `good` to `bad`, and fills `breaks`.

        Args:
            good: the revision to begin at, or where its branch left; what is broken there already is reported as such.
            bad: the revision to end at.
            step: told of each commit: how many are done, how many there are, its name.

        Raises:
            SourceError: a revision doesn't exist or doesn't hold the package, or neither `good` nor the place where its
                branch left is among the first parents of `bad`.
        """
        end = self.repository.commit(bad)
        begin, chain = self._chain(self.repository.commit(good), end, good, bad)
        files = _Files(self.lock.manifest.package, self.repository, begin)
        for target in self.lock.holders:
            self._take_census(target, files)
        for name in self.lock.symbols:
            self._look(name, files)
        self.start = self._commit(begin)
        self.counts.commits = 1
        step(0, len(chain), begin[:12])
        broken: dict[str, Break] = {}
        self._note(broken, begin, at_start=True)
        for number, (name, changes) in enumerate(self._commits(f"{begin}..{end}") if chain else ()):
            self.counts.commits += 1
            step(number + 1, len(chain), name[:12])
            if self._again(files, self._apply(files, name, changes)):
                self._note(broken, name, at_start=False)
        # What is gone may have got a new place since it went.
        for name, state in list(self._states.items()):
            if isinstance(state.found, Absence):
                self._look(name, files, afresh=True)
        self.breaks = tuple(self._result(entry, broken.get(entry.id)) for entry in self.lock.manifest.entries)

    def _chain(self, good: str, end: str, good_name: str, bad_name: str) -> tuple[str, list[str]]:
        """Where to begin, and the commits to walk over, the last one first."""
        # A release is often tagged on a branch of its own: then the walk begins where that branch left.
        begin = self.repository.run("merge-base", good, end).strip()
        self.left = begin != good
        if begin == end != good:
            raise SourceError(f"{bad_name} comes before {good_name}; write the older end first")
        chain = self.repository.run("rev-list", "--first-parent", f"{begin}..{end}").split()
        reached = self.repository.run("rev-parse", f"{chain[-1]}^1").strip() if chain else end
        if reached != begin:
            raise SourceError(f"{good_name} is not among the first parents of {bad_name}, nor is where it branched off")
        return begin, chain

    def _result(self, entry: Entry, first: Break | None) -> Break:
        last = Standing.worst(part.standing for part in self._parts(entry))
        if first is None:
            return Break(entry.id, None, (), False, last)
        return replace(first, last=last)

    def _note(self, broken: dict[str, Break], name: str, *, at_start: bool) -> None:
        """Notes which patches a commit breaks."""
        new: dict[str, tuple[Part, ...]] = {}
        for entry in self.lock.manifest.entries:
            differ = tuple(part for part in self._parts(entry) if part.standing is not Standing.SAME)
            if differ and entry.id not in broken:
                new[entry.id] = differ
            elif not differ and entry.id in broken and broken[entry.id].at_start:
                del broken[entry.id]  # The beginning was before what is pinned.
        if new:
            commit = self._commit(name)
            broken |= {key: Break(key, commit, parts, at_start, Standing.SAME) for key, parts in new.items()}

    def _apply(self, files: _Files, commit: str, changes: Changes) -> list[str]:
        """Takes a commit's changes over; gives the package's Python files among them."""
        before = dict(files.blobs)
        changed = files.take(commit, changes)
        for file in changed:  # Syntax trees are large: only those of the present files are kept.
            self._parsed.pop((file, before.get(file)), None)
        return changed

    def _again(self, files: _Files, changed: list[str]) -> bool:
        """Looks again at what was found through a changed file; says whether anything may be different."""
        modules = {module_of(file) for file in changed}
        stale = [name for name, state in self._states.items() if state.modules & modules]
        for name in stale:
            self._look(name, files)
        return self._search(files, changed) or bool(stale)

    def _look(self, name: str, files: _Files, *, afresh: bool = False) -> None:
        before = self._states.get(name)
        if before is not None and not afresh:
            known = self._results.get((name, self._key(before.modules, files)))
            if known is not None:
                self._states[name] = known
                return
        tree = _Tree(self, files)
        self.counts.looked += 1
        found: Symbol | Absence
        try:
            found = tree.resolve(name)
            asked = frozenset(tree.asked)
        except SymbolAbsent:
            asked = frozenset(tree.asked)
            # The search for where it went reads every file: once when it goes, and once at the end.
            if before is not None and isinstance(before.found, Absence) and not afresh:
                found = before.found
            else:
                found = TreeView(tree).look(self.lock.symbols[name])
        self._states[name] = self._results[name, self._key(asked, files)] = _State(found, asked)

    def _key(self, modules: frozenset[str], files: _Files) -> tuple[tuple[str, str | None, str | None], ...]:
        """The blobs of some modules' files."""
        stems = ((module, module.replace(".", "/")) for module in sorted(modules))
        return tuple(
            (module, files.blobs.get(f"{stem}.py"), files.blobs.get(f"{stem}/__init__.py")) for module, stem in stems
        )

    def _search(self, files: _Files, changed: list[str]) -> bool:
        """Keeps the census of holders up to date; says whether it is another now."""
        if not self._held or not changed:
            return False
        before = {target: census.held for target, census in self._held.items()}
        data = {file: files.read(file) or b"" for file in changed}
        self.counts.searched += len(changed)
        for target, census in list(self._held.items()):
            if any(census.concerns(file, text) for file, text in data.items()):
                self._take_census(target, files)
        return before != {target: census.held for target, census in self._held.items()}

    def _take_census(self, target: str, files: _Files) -> None:
        tree = _Tree(self, files)
        held = holders_of(tree, target)
        names = {target.partition(":")[2], *(name for module in held for name in held_names(tree, module, target))}
        self._held[target] = _Census(set(held), names, tree.asked)

    def _parts(self, entry: Entry) -> tuple[Part, ...]:
        parts = [compare(self.lock.symbols[name], self._states[name].found) for name in entry.symbols]
        census = self._held.get(entry.target)
        if census is not None and parts[0].standing not in (Standing.GONE, Standing.MOVED):
            gone, come = set(entry.holders) - census.held, census.held - set(self.lock.holders[entry.target])
            parts += [Part(name, Standing.INTERFACE, "no longer holds the target") for name in sorted(gone)]
            parts += [Part(name, Standing.INTERFACE, "holds the target too") for name in sorted(come)]
        return tuple(parts)

    def _commit(self, name: str) -> Commit:
        """What is told of a commit. Its message is its author's: nothing in it takes part in the parsing."""
        options = ("--no-patch", "--no-show-signature", "--encoding=UTF-8", "--format=%cI%n%s")
        date, _, subject = self.repository.run("show", *options, name).removesuffix("\n").partition("\n")
        return Commit(name, date, subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))

    def _commits(self, selection: str) -> Iterator[tuple[str, Changes]]:
        """The selected commits of the first-parent history, the oldest first, with the changes against that parent."""
        # The user's settings for merges, signatures, renames and relative paths are not ours.
        options = ("--diff-merges=first-parent", "--no-show-signature", "--no-renames", "--no-relative")
        shape = ("--first-parent", "--reverse", "--raw", "--no-abbrev", "-z", "--format=%H")
        fields = iter(self.repository.run("log", *options, *shape, selection).split("\0"))
        name, changes = "", Changes()
        for item in fields:
            item = item.lstrip("\n")
            if item.startswith(":"):
                old, mode, _, blob, _ = item.split()
                path = next(fields)
                changes[path] = LINK if LINK in (old[1:], mode) else blob if mode.startswith("100") else None
            elif item:
                if name:
                    yield name, changes
                name, changes = item, Changes()
        if name:
            yield name, changes


class _Files(GitFiles):
    """A commit's files, kept in memory and brought up to date from commit to commit."""

    def __init__(self, package: str, repository: GitRepository, commit: str) -> None:
        super().__init__(package, repository, commit)
        self._package = package
        self._data = dict(super().read_all(self.blobs))

    def read(self, file: str) -> bytes | None:
        """A file's bytes, or None if there is no such file."""
        return self._data.get(file)

    def read_all(self, files: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Many files' bytes; a file that isn't there is left out."""
        return ((file, self._data[file]) for file in files if file in self._data)

    def take(self, commit: str, changes: Changes) -> list[str]:
        """Takes a commit's changes over; gives the package's files among them."""
        inside = f"{self.prefix}{self._package}/"
        blobs = dict(self.blobs)
        moved = any(f"/{path}".endswith(f"/{self._package}/__init__.py") for path in changes)
        if moved or not blobs or self.linked or LINK in changes.values():
            # The package may be elsewhere in the repository now, or nowhere.
            blobs = {}
            with suppress(SourceError):
                there = GitFiles(self._package, self._repository, commit)
                self.prefix, self.linked, blobs = there.prefix, there.linked, there.blobs
        else:
            for path, blob in changes.items():
                if path.startswith(inside) and path.endswith(".py"):
                    file = path[len(self.prefix) :]
                    blobs.pop(file, None)
                    blobs |= {file: blob} if blob is not None else {}
        changed = [file for file in {**self.blobs, **blobs} if self.blobs.get(file) != blobs.get(file)]
        self.blobs = blobs
        for file in changed:
            self._data.pop(file, None)
        self._data |= super().read_all(changed)
        return changed


class _Tree(SourceTree):
    """A commit's source, whose parsed files are shared by blob with those of all other commits."""

    def __init__(self, walk: Walk, files: _Files) -> None:
        super().__init__(walk.lock.manifest.package, walk.repository.directory, files)
        self._walk = walk
        self._blobs = files.blobs
        self.asked: set[str] = set()

    def file(self, module: str) -> SourceFile | None:
        """A module's source, or None; which were asked for is remembered."""
        self.asked.add(module)
        return super().file(module)

    def _load(self, module: str, file: str) -> SourceFile | None:
        blob = self._blobs.get(file)
        if blob is None:
            return None
        key = (file, blob)
        if key not in self._walk._parsed:
            data = self.files.read(file) or b""
            self._walk._parsed[key] = SourceFile(module, file, data)
            self._walk.counts.blobs += 1
        return self._walk._parsed[key]
