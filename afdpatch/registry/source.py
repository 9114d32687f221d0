"""A package's source on disk, read without importing it: its files, its version, and where a symbol is defined."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from afdpatch.registry import fingerprint
from afdpatch.registry.files import DirectoryFiles, Files, SourceError
from afdpatch.registry.lineage import Class, base_names, branches, end, lineage, parts, position, possible, walruses
from afdpatch.registry.scope import COMPREHENSIONS, Binding, attribute_bindings, bindings, dotted


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
        files: every file that was read to find it, sorted.
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


def _in_comprehension(cls: ast.ClassDef, node: ast.expr) -> bool:
    """Whether the class's names aren't seen at a place in its body: in a comprehension, but for its first iterable."""
    inside = (item for item in ast.walk(cls) if isinstance(item, COMPREHENSIONS) and node in ast.walk(item))
    return any(node not in ast.walk(item.generators[0].iter) for item in inside)


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
        self._scopes: dict[ast.AST, dict[str, list[Binding]]] = {}

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
    def parses(self) -> bool:
        """Whether this Python can parse it."""
        try:
            return bool(self.tree)
        except SymbolAbsent:
            return False

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

    def scope(self, node: ast.AST) -> dict[str, list[Binding]]:
        """The bindings in a class or a function of the module; a function's parameters are bound by itself."""
        if node not in self._scopes:
            table = bindings(getattr(node, "body", []))
            if isinstance(node, fingerprint.Function):
                parameters = (item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg))
                table = {name: [Binding(node, ())] for name in parameters} | table
            self._scopes[node] = table
        return self._scopes[node]

    @cached_property
    def _statements(self) -> list[tuple[ast.stmt, tuple[ast.AST, ...]]]:
        """Every statement at any depth, with the classes and functions around it."""
        return list(_statements(self.tree.body, ()))

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """Every class statement of the module, those in classes and functions too."""
        return tuple(Class(self, node, around) for node, around in self._statements if isinstance(node, ast.ClassDef))

    def is_of_class(self, classes: Sequence[str], name: str, node: ast.expr) -> bool:
        """Whether a name in a class's body, not in its methods', is the class's own, and not by an import.

        Args:
            classes: the names of the classes around it.
            name: the name.
            node: where it stands.
        """
        around = self.class_around(classes, node)
        found = possible(self.scope(around).get(name, []), position(node)) if around is not None else []
        own = any(not item.within and not isinstance(item.node, ast.ImportFrom) for item in found)
        return own and around is not None and not _in_comprehension(around, node)

    def class_around(self, classes: Sequence[str], node: ast.stmt | ast.expr) -> ast.ClassDef | None:
        """The class of these names, each in the one before, that a place stands in; there may be several of them."""
        known = (cls for cls in self.classes if classes and cls.node.name == classes[-1])
        around = (cls.node for cls in known if cls.qualname == ".".join(classes))
        return next((cls for cls in around if position(cls) < position(node) <= end(cls)), None)

    @cached_property
    def other_names(self) -> dict[str, set[str]]:
        """By the last part of a name, the other names that the module gives to what has it or is made of it."""
        table: dict[str, set[str]] = {}
        walrus = b":=" in self.data
        for node, around in self._statements:
            if any(isinstance(item, fingerprint.Function) for item in around):
                continue  # a function's own names lead to no other module
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    table.setdefault(alias.name, set()).update([alias.asname] if alias.asname else [])
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                _add_names(table, node.targets if isinstance(node, ast.Assign) else [node.target], node.value)
            for item in walruses(node) if walrus else ():
                _add_names(table, [item.target], item.value)
        return table

    @cached_property
    def _exported(self) -> tuple[frozenset[str], bool]:
        """What `__all__` may list, as far as it is written out, and whether it lists nothing else for certain."""
        found = self.top("__all__")
        changed = b"__all__" in self.data and any(_changes_all(node) for node in ast.walk(self.tree))
        nodes: list[ast.AST] = [self.tree] if changed else [item.node for item in found]
        texts = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant)]
        names = frozenset(part.value for part in texts if isinstance(part.value, str))
        written = all(_is_written_out(getattr(item.node, "value", None)) for item in found)
        return names, written and not changed and any(not item.within for item in found)

    def exports(self, name: str) -> bool:
        """Whether `import *` may take a name, if the module has it."""
        names, certain = self._exported
        return name in names or not (certain or name.startswith("_"))

    def surely_exports(self, name: str) -> bool:
        """Whether `import *` is sure to take a name, if the module has it."""
        names, certain = self._exported
        listed = certain and name in names and len(self.top("__all__")) == 1
        return listed or not (b"__all__" in self.data or name.startswith("_"))


def _add_names(table: dict[str, set[str]], targets: Sequence[ast.expr], value: ast.expr) -> None:
    """Adds what an assignment names, by the last name of each part of its value."""
    names = {item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)}
    plain = {id(part) for part in branches(value)}
    for part in parts(value):  # what a call makes is a class if its name says so
        given = (name for name in names if id(part) in plain or name.lstrip("_")[:1].isupper())
        table.setdefault(base_names(part)[-1], set()).update(given)


def _changes_all(node: ast.AST) -> bool:
    """Whether a part of a module changes its `__all__` in place, or may: `__all__.append`, `__all__[…]`."""
    return isinstance(node, ast.Attribute | ast.Subscript) and dotted(node.value) == ["__all__"]


def _is_written_out(value: ast.expr | None) -> bool:
    return isinstance(value, ast.List | ast.Tuple) and all(isinstance(item, ast.Constant) for item in value.elts)


def _statements(
    statements: Sequence[ast.stmt], around: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.stmt, tuple[ast.AST, ...]]]:
    todo = [(node, around) for node in reversed(statements)]
    while todo:
        node, around = todo.pop()
        yield node, around
        inner = (*around, node) if isinstance(node, (*fingerprint.Function, ast.ClassDef)) else around
        for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for field in ("finalbody", "orelse", "body"):
                todo += [(item, inner) for item in reversed(getattr(part, field, ()))]


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
        lineages: the orders of bases that are known, each with the modules that were asked for it.
    """

    def __init__(self, package: str, root: Path, files: Files | None = None) -> None:
        self.package = package
        self.root = root
        self.files: Files = DirectoryFiles(package, root) if files is None else files
        self.lineages: dict[Class, tuple[tuple[Class, ...], tuple[str, ...]]] = {}
        self._files: dict[str, SourceFile | None] = {}
        self._asked: dict[str, None] = {}
        self._containing: dict[bytes, tuple[tuple[str, bytes], ...]] = {}

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

    def containing(self, letters: bytes) -> tuple[tuple[str, bytes], ...]:
        """Those of `contents` that have these bytes.

        A search through all of vLLM takes 15 ms. What has a subclass's name has its parent's too where that is a part
        of it, as it mostly is: then only those files are searched.
        """
        if letters not in self._containing:
            known = (found for part, found in self._containing.items() if part in letters)
            among = min(known, key=len, default=self.contents)
            self._containing[letters] = tuple(item for item in among if letters in item[1])
        return self._containing[letters]

    def file(self, module: str) -> SourceFile | None:
        """A module's source, or None if the package has no such file."""
        if module.partition(".")[0] != self.package:
            return None  # what lies beside the package isn't a part of this source
        self._asked[module] = None
        if module not in self._files:
            stem = module.replace(".", "/")
            self._files[module] = self._load(module, f"{stem}/__init__.py") or self._load(module, f"{stem}.py")
        return self._files[module]

    @contextmanager
    def asking(self) -> Iterator[dict[str, None]]:
        """Collects the modules that are asked for within it."""
        outer, self._asked = self._asked, {}
        try:
            yield self._asked
        finally:
            outer.update(self._asked)
            self._asked = outer

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
        from afdpatch.registry.resolving import resolve  # which reads what is here

        return resolve(self, symbol)[0]

    def nodes(self, symbol: str) -> tuple[SourceFile, list[ast.stmt]]:
        """The file and the syntax trees of a symbol's definitions. Raises as `resolve` does."""
        from afdpatch.registry.resolving import resolve

        found, nodes = resolve(self, symbol)
        source = self.source(found.file)
        assert source is not None, found.file
        return source, nodes

    def lineage(self, symbol: str) -> tuple[Class, ...]:
        """A class and its bases in Python's order, as far as they can be followed; empty if it is no class.

        Raises:
            SymbolAbsent: as `resolve` does.
        """
        from afdpatch.registry.resolving import find

        found = find(self, symbol)
        return lineage(self, found.cls) if found.cls is not None else ()

    def definition(self, module: str, qualname: str) -> str:
        """Where a name of a module is defined: `from x import y` is followed as far as it can be."""
        from afdpatch.registry.resolving import definition

        return definition(self, module, qualname)

    def definitions(self, module: str, qualname: str) -> set[str]:
        """Every place where a name of a module may be defined, should several imports bind it."""
        from afdpatch.registry.resolving import definitions

        return definitions(self, module, qualname)


def module_of(file: str) -> str:
    """The module that a file, given by its path from the root, is the source of."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
