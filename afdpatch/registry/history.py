"""A walk over a git history: the first commit that breaks each patch, in one pass, with nothing done twice.

The history is followed by first parents. A commit costs what it changes: git says which files, and only patches that
were found through one of them are looked at again. What a blob was parsed to is kept by the blob's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from afdpatch.registry.census import held_names, holders_of
from afdpatch.registry.compat import Absence, Part, Standing, TreeView, compare
from afdpatch.registry.files import SourceError
from afdpatch.registry.gitfiles import GitFiles, GitRepository
from afdpatch.registry.lock import Lock
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceFile, SourceTree, Symbol, SymbolAbsent, module_of

RECORD = "\x1e"


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
        self._held: dict[str, set[str]] = {}

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
        files = GitFiles(self.lock.manifest.package, self.repository, begin)
        tree = _Tree(self, files)
        self._held = {target: set(holders_of(tree, target)) for target in self.lock.holders}
        for name in self.lock.symbols:
            self._look(name, files)
        self.start = next(self._commits("-1", begin))[0]
        self.counts.commits = 1
        step(0, len(chain), begin[:12])
        broken: dict[str, Break] = {}
        self._note(broken, self.start, at_start=True)
        for number, (commit, changes) in enumerate(self._commits("--reverse", f"{begin}..{end}") if chain else ()):
            self.counts.commits += 1
            step(number + 1, len(chain), commit.name[:12])
            if self._again(files, self._apply(files, changes)):
                self._note(broken, commit, at_start=False)
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

    def _note(self, broken: dict[str, Break], commit: Commit, *, at_start: bool) -> None:
        for entry in self.lock.manifest.entries:
            differ = tuple(part for part in self._parts(entry) if part.standing is not Standing.SAME)
            if differ and entry.id not in broken:
                broken[entry.id] = Break(entry.id, commit, differ, at_start, Standing.SAME)
            elif not differ and entry.id in broken and broken[entry.id].at_start:
                del broken[entry.id]  # The beginning was before what is pinned.

    def _apply(self, files: GitFiles, changes: Iterable[tuple[str, str | None]]) -> list[str]:
        """Takes a commit's changes over; gives the package's Python files among them."""
        inside = f"{files.prefix}{self.lock.manifest.package}/"
        changed = []
        for path, blob in changes:
            if not (path.startswith(inside) and path.endswith(".py")):
                continue
            file = path[len(files.prefix) :]
            changed.append(file)
            old = files.blobs.pop(file, None)
            # Syntax trees are large: only those of the present files are kept.
            self._parsed.pop((file, old), None)
            if blob is not None:
                files.blobs[file] = blob
        return changed

    def _again(self, files: GitFiles, changed: list[str]) -> bool:
        """Looks again at what was found through a changed file; says whether anything may be different."""
        modules = {module_of(file) for file in changed}
        stale = [name for name, state in self._states.items() if state.modules & modules]
        for name in stale:
            self._look(name, files)
        return self._search(files, changed) or bool(stale)

    def _look(self, name: str, files: GitFiles, *, afresh: bool = False) -> None:
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

    def _key(self, modules: frozenset[str], files: GitFiles) -> tuple[tuple[str, str | None, str | None], ...]:
        """The blobs of some modules' files."""
        stems = ((module, module.replace(".", "/")) for module in sorted(modules))
        return tuple(
            (module, files.blobs.get(f"{stem}.py"), files.blobs.get(f"{stem}/__init__.py")) for module, stem in stems
        )

    def _search(self, files: GitFiles, changed: list[str]) -> bool:
        """Keeps the census of holders up to date: each new blob is searched for the targets' names, hits are parsed."""
        if not self._held or not changed:
            return False
        before = {target: set(held) for target, held in self._held.items()}
        names = {target: target.rpartition(":")[2].encode() for target in self._held}
        data = dict(files.read_all(changed))
        self.counts.searched += len(data)
        tree = _Tree(self, files)
        for file in changed:
            module = module_of(file)
            for target, held in self._held.items():
                word = names[target]
                text = data.get(file, b"")
                mentions = (word in text and re.search(rb"\b%s\b" % word, text)) or b"import *" in text
                if mentions and held_names(tree, module, target):
                    held.add(module)
                else:
                    held.discard(module)
        return before != self._held

    def _parts(self, entry: Entry) -> tuple[Part, ...]:
        parts = [compare(self.lock.symbols[name], self._states[name].found) for name in entry.symbols]
        held = self._held.get(entry.target)
        if held is not None and parts[0].standing not in (Standing.GONE, Standing.MOVED):
            gone, come = set(entry.holders) - held, held - set(self.lock.holders[entry.target])
            parts += [Part(name, Standing.INTERFACE, "no longer holds the target") for name in sorted(gone)]
            parts += [Part(name, Standing.INTERFACE, "holds the target too") for name in sorted(come)]
        return tuple(parts)

    def _commits(self, *selection: str) -> Iterator[tuple[Commit, list[tuple[str, str | None]]]]:
        """The selected commits of the first-parent history, each with its changes against its first parent."""
        options = ("--first-parent", "-m", "--raw", "--no-abbrev", "--no-renames", "-z")
        text = self.repository.run("log", *options, f"--format={RECORD}%H%x00%cI%x00%s%x00", *selection)
        for record in text.split(RECORD)[1:]:
            name, date, subject, *rest = record.split("\0")
            fields = [item.lstrip("\n") for item in rest]
            fields = [item for item in fields if item]
            changes: list[tuple[str, str | None]] = []
            for meta, path in zip(fields[::2], fields[1::2], strict=False):
                _, mode, _, blob, status = meta.split()
                changes.append((path, None if status == "D" or not mode.startswith("100") else blob))
            yield Commit(name, date, subject), changes


class _Tree(SourceTree):
    """A commit's source, whose parsed files are shared by blob with those of all other commits."""

    def __init__(self, walk: Walk, files: GitFiles) -> None:
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
            data = self.files.read(file)
            if data is None:
                return None
            self._walk._parsed[key] = SourceFile(module, file, data)
            self._walk.counts.blobs += 1
        return self._walk._parsed[key]
