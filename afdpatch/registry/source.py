"""A package's source on disk, read without importing it: its files, its version, and where a symbol is defined."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from afdpatch.registry import fingerprint
from afdpatch.registry.files import DirectoryFiles, Files, SourceError
from afdpatch.registry.scope import Binding, alias_of, attribute_bindings, bindings, kind_of


class SymbolAbsent(LookupError):
    """A symbol has no definition where it was looked for; the text says what was found."""


class SymbolMoved(SymbolAbsent):
    """A symbol is only imported where it was looked for.

    Attributes:
        definition: where it is defined, as `module:Qualified.name`.
    """

    def __init__(self, text: str, definition: str) -> None:
        super().__init__(text)
        self.definition = definition


@dataclass(frozen=True)
class Symbol:
    """A symbol as the source has it.

    Attributes:
        name: what was looked for, `module:Qualified.name`.
        defined_as: where the definition stands; differs from `name` for what a class inherits.
        kind: `function`, `staticmethod`, `classmethod`, `property`, `class` or `value`.
        file: the definition's file, from the directory that holds the package.
        line: the definition's line (the last one's, if there are several).
        decorators: how many decorators it has, `staticmethod` and `classmethod` left out.
        body: fingerprint of what it does.
        interface: fingerprint of how it is used.
        files: every file that was read to find it.
        words: in a lock, the longest identifiers of what it does, by which a file that may hold the same body elsewhere
            is known; empty elsewhere.
    """

    name: str
    defined_as: str
    kind: str
    file: str
    line: int
    decorators: int
    body: str
    interface: str
    files: tuple[str, ...]
    words: tuple[str, ...] = ()


class SourceFile:
    """One module's source.

    Attributes:
        module: the module's name.
        file: its path from the directory that holds the package, with slashes.
        data: its bytes.
    """

    def __init__(self, module: str, file: str, data: bytes) -> None:
        self.module = module
        self.file = file
        self.data = data

    @cached_property
    def sha256(self) -> str:
        """The hash of its bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree.

        Raises:
            SymbolAbsent: this Python cannot parse the file.
        """
        try:
            return ast.parse(self.data, filename=self.file)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SymbolAbsent(f"{self.file} cannot be parsed: {error}") from error

    @cached_property
    def _bindings(self) -> dict[str, list[Binding]]:
        return bindings(self.tree.body)

    @cached_property
    def _assigned(self) -> dict[str, list[Binding]]:
        return attribute_bindings(self.tree.body)

    def assigned(self, qualname: str) -> list[Binding]:
        """The statements at the top level that assign to an attribute, or delete it: `Engine.run = faster`."""
        return self._assigned.get(qualname, [])

    def top(self, name: str) -> list[Binding]:
        """The bindings of a name at the module's top level."""
        return self._bindings.get(name, [])

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a `from … import` names."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        drop = node.level - (1 if self.file.endswith("/__init__.py") else 0)
        base = parts[: len(parts) - drop] if drop else parts
        return ".".join([*base, *([node.module] if node.module else [])])

    def imports(self, module: str, name: str) -> bool:
        """Whether the module's own code, at any depth, has `from module import name`."""
        return any(
            isinstance(node, ast.ImportFrom)
            and self.absolute(node) == module
            and any(alias.name in (name, "*") for alias in node.names)
            for node in ast.walk(self.tree)
        )

    def starred(self) -> Iterator[str]:
        """The modules of which everything is imported."""
        for binding in self.top("*"):
            if isinstance(binding.node, ast.ImportFrom):
                yield self.absolute(binding.node)


class SourceTree:
    """The source of one package.

    Args:
        package: the package's name.
        root: the directory that holds the package's folder, or the archive or repository that does.
        files: where the files come from; left out: from the directory `root`.

    Attributes:
        package: the package's name.
        root: as given.
        files: as given.
    """

    def __init__(self, package: str, root: Path, files: Files | None = None) -> None:
        self.package = package
        self.root = root
        self.files: Files = DirectoryFiles(package, root) if files is None else files
        self._files: dict[str, SourceFile | None] = {}

    @classmethod
    def installed(cls, package: str) -> SourceTree:
        """The source of the installed package, which is not imported.

        Raises:
            FileNotFoundError: it isn't installed as Python source.
        """
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"{package} is not installed as a package of Python source")
        return cls(package, Path(next(iter(spec.submodule_search_locations))).parent)

    @classmethod
    def at(cls, package: str, directory: Path) -> SourceTree:
        """The source in a directory that holds the package's folder, or in that folder itself.

        Raises:
            FileNotFoundError: there is no such package in it.
        """
        directory = directory.resolve()
        if (directory / package / "__init__.py").is_file():
            return cls(package, directory)
        if directory.name == package and (directory / "__init__.py").is_file():
            return cls(package, directory.parent)
        raise FileNotFoundError(f"{directory} neither holds a folder {package!r} with __init__.py nor is one")

    @classmethod
    def open(cls, package: str, source: str) -> SourceTree:
        """The source that a text names: a directory, a wheel, an sdist, or `git:DIR@REV` (`git:DIR`: its HEAD).

        Raises:
            SourceError: there is none.
            FileNotFoundError: the directory doesn't hold the package.
        """
        if source.startswith("git:"):
            from afdpatch.registry.gitfiles import GitFiles, GitRepository

            place, at, revision = source.removeprefix("git:").rpartition("@")
            directory = Path(place if at else revision)
            repository = GitRepository(directory)
            return cls(package, directory, GitFiles(package, repository, repository.commit(revision if at else "HEAD")))
        path = Path(source)
        if path.is_dir():
            return cls.at(package, path)
        if not path.is_file():
            raise SourceError(f"{source} is neither a directory nor a file, nor does it begin with git:")
        from afdpatch.registry.archives import SdistFiles, WheelFiles

        archive = WheelFiles(package, path) if path.suffix in (".whl", ".zip") else SdistFiles(package, path)
        return cls(package, path, archive)

    @property
    def label(self) -> str:
        """What to call the source in reports."""
        return self.files.label

    @cached_property
    def contents(self) -> tuple[tuple[str, bytes], ...]:
        """Every Python file of the package: its path and its bytes. For searches; some 40 MB for vLLM."""
        return tuple(self.files.read_all(self.files.python_files()))

    def file(self, module: str) -> SourceFile | None:
        """A module's source, or None if the tree has no such file."""
        if module not in self._files:
            stem = module.replace(".", "/")
            self._files[module] = self._load(module, f"{stem}/__init__.py") or self._load(module, f"{stem}.py")
        return self._files[module]

    def _load(self, module: str, file: str) -> SourceFile | None:
        data = self.files.read(file)
        return None if data is None else SourceFile(module, file, data)

    def source(self, file: str) -> SourceFile | None:
        """The source of a file given by its path from the root, or None if there is no such file."""
        found = self.file(module_of(file))
        return found if found is not None and found.file == file else None

    def sha256(self, file: str) -> str | None:
        """The hash of a file given by its path from the root, or None if there is no such file."""
        source = self.source(file)
        return source.sha256 if source is not None else None

    def constants(self, module: str) -> dict[str, object]:
        """The names of a module that are plainly assigned a literal at its top level."""
        source = self.file(module)
        values: dict[str, object] = {}
        for node in source.tree.body if source is not None else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        return values

    def resolve(self, symbol: str) -> Symbol:
        """Finds a symbol and takes its fingerprints.

        Args:
            symbol: `module:Qualified.name`. Of a class, inherited names are found through its bases as far as those are
                plain names of classes in the package.

        Raises:
            SymbolMoved: the module only imports it.
            SymbolAbsent: the module has no such name.
        """
        return _resolve(self, symbol, symbol, ())[0]

    def nodes(self, symbol: str) -> tuple[SourceFile, list[ast.stmt]]:
        """The file and the syntax trees of a symbol's definitions. Raises as `resolve` does."""
        found, nodes = _resolve(self, symbol, symbol, ())
        source = self.source(found.file)
        assert source is not None, found.file
        return source, nodes

    def class_of(self, source: SourceFile, base: ast.expr) -> str | None:
        """Where a base class, as a class statement of a file names it, is defined; None if that can't be followed."""
        return _class_of(self, source, base)

    def definition(self, module: str, qualname: str) -> str:
        """Where a name of a module is defined: `from x import y` is followed as far as it can be."""
        return _definition(self, module, qualname)


def module_of(file: str) -> str:
    """The module that a file, given by its path from the root, is the source of."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _resolve(tree: SourceTree, asked: str, symbol: str, seen: tuple[str, ...]) -> tuple[Symbol, list[ast.stmt]]:
    if symbol in seen:
        raise SymbolAbsent(f"{symbol} leads back to itself")
    module, _, qualname = symbol.partition(":")
    source = tree.file(module)
    if source is None:
        raise SymbolAbsent(f"there is no module {module}")
    files = tuple(dict.fromkeys([*(_file_of(tree, item) for item in seen), source.file]))
    owners: list[ast.ClassDef] = []
    others: list[Binding] = []  # what else the names of the classes around it may be
    parts = qualname.split(".")
    for index, part in enumerate(parts):
        found = bindings(owners[-1].body).get(part, []) if owners else source.top(part)
        defined = [item for item in found if not isinstance(item.node, ast.Import | ast.ImportFrom | ast.Delete)]
        if found and isinstance(found[-1].node, ast.Delete):
            raise SymbolAbsent(f"{source.file}:{found[-1].node.lineno} deletes {part!r}")
        if not defined and owners and index + 1 == len(parts):
            defined = found = source.assigned(qualname)
        if not defined and owners:
            return _inherited(tree, asked, symbol, source, owners[-1], ".".join(parts[index:]), (*seen, symbol))
        if not defined:
            raise _imported(tree, source, part, ".".join(parts[index + 1 :]), found)
        if index + 1 < len(parts):
            owner = defined[-1].node
            if not isinstance(owner, ast.ClassDef):
                raise SymbolAbsent(
                    f"{module}:{'.'.join(parts[: index + 1])} is not a class ({source.file}:{owner.lineno})"
                )
            others += [item for item in found if item.node is not owner]
            others += [item for item in source.top("*") if not owners and item.node.lineno > owner.lineno]
            owners.append(owner)
    # What an import or a star after it may put in its place is a part of it too.
    last = defined[-1].node
    later = source.assigned(qualname) if owners else source.top("*")
    found = [*others, *found, *(item for item in later if item.node.lineno > last.lineno)]
    nodes = [item.node for item in found]
    kind, decorators = kind_of(last)
    result = Symbol(
        name=asked,
        defined_as=symbol,
        kind=kind,
        file=source.file,
        line=last.lineno,
        decorators=decorators,
        body=fingerprint.body(nodes),
        interface=fingerprint.interface(nodes, [item.guard for item in found], owners),
        files=files,
    )
    return result, [item for item in nodes if item is not last] + [last]


def _file_of(tree: SourceTree, symbol: str) -> str:
    source = tree.file(symbol.partition(":")[0])
    return source.file if source is not None else ""


def _inherited(
    tree: SourceTree, asked: str, symbol: str, source: SourceFile, owner: ast.ClassDef, rest: str, seen: tuple[str, ...]
) -> tuple[Symbol, list[ast.stmt]]:
    """Looks for an attribute in the bases: the first that has it, unless a class below that one has it too."""
    found: dict[str, tuple[Symbol, list[ast.stmt]]] = {}
    for base in owner.bases:
        where = _class_of(tree, source, base)
        if where is None:
            continue
        with suppress(SymbolAbsent):
            inherited, nodes = _resolve(tree, asked, f"{where}.{rest}", seen)
            found.setdefault(inherited.defined_as.removesuffix(f".{rest}"), (inherited, nodes))
    lineages = {name: _lineage(tree, name) for name in found} if len(found) > 1 else {}
    for name, result in found.items():
        if not any(name in lineage for other, lineage in lineages.items() if other != name):
            return result
    raise SymbolAbsent(f"class {owner.name} ({source.file}:{owner.lineno}) neither has nor visibly inherits {rest!r}")


def _lineage(tree: SourceTree, owner: str) -> set[str]:
    """A class and its bases at any distance, as far as they can be followed."""
    found: set[str] = set()
    todo = [owner]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(SymbolAbsent):
            source, nodes = tree.nodes(name)
            if isinstance(nodes[-1], ast.ClassDef):
                todo += [where for base in nodes[-1].bases if (where := _class_of(tree, source, base)) is not None]
    return found


def _class_of(tree: SourceTree, source: SourceFile, base: ast.expr) -> str | None:
    """Where a base class is defined, if it is a plain name: this module's, imported, or of an imported module."""
    if isinstance(base, ast.Subscript):
        base = base.value
    names: list[str] = []
    while isinstance(base, ast.Attribute):
        names.insert(0, base.attr)
        base = base.value
    if not isinstance(base, ast.Name):
        return None
    found = source.top(base.id)
    if any(isinstance(item.node, ast.ClassDef) for item in found):
        return f"{source.module}:{'.'.join([base.id, *names])}"
    for item in found:
        node = item.node
        if isinstance(node, ast.ImportFrom):
            module = source.absolute(node)
            name = alias_of(node, base.id).name
            if tree.file(module) is not None and tree.file(f"{module}.{name}") is None:
                return _definition(tree, module, ".".join([name, *names]))
            if names and tree.file(f"{module}.{name}") is not None:
                return _definition(tree, f"{module}.{name}", ".".join(names))
        if isinstance(node, ast.Import) and names:
            alias = alias_of(node, base.id)
            dotted = [*(alias.name if alias.asname else base.id).split("."), *names]
            for cut in range(len(dotted) - 1, 0, -1):
                if tree.file(".".join(dotted[:cut])) is not None:
                    return _definition(tree, ".".join(dotted[:cut]), ".".join(dotted[cut:]))
    return None


def _definition(tree: SourceTree, module: str, qualname: str, seen: tuple[str, ...] = ()) -> str:
    """Follows `from x import y` from a module to the one that defines a name; stops where it can't be followed."""
    source = tree.file(module)
    here = f"{module}:{qualname}"
    first, _, rest = qualname.partition(".")
    if source is None or here in seen:
        return here
    nodes = [item.node for item in source.top(first)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    if len(imports) < len(nodes):
        return here
    if imports:
        name = alias_of(imports[0], first).name
        onward = f"{name}.{rest}" if rest else name
        return _definition(tree, source.absolute(imports[0]), onward, (*seen, here))
    for star in source.starred():
        there, _, name = _definition(tree, star, qualname, (*seen, here)).partition(":")
        other = tree.file(there)
        if other is not None and other.top(name.partition(".")[0]):
            return f"{there}:{name}"
    return here


def _imported(tree: SourceTree, source: SourceFile, name: str, rest: str, found: Sequence[Binding]) -> SymbolAbsent:
    qualname = f"{name}.{rest}" if rest else name
    definition = _definition(tree, source.module, qualname)
    if definition != f"{source.module}:{qualname}":
        return SymbolMoved(f"{source.file} only imports it; it is defined at {definition}", definition)
    if found:
        return SymbolAbsent(f"{source.file}:{found[-1].node.lineno} imports {name!r} as a module")
    return SymbolAbsent(f"{source.file} has no {name!r}")
