"""A package's source on disk, read without importing it: its files, its version, and where a symbol is defined."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from afdpatch.registry import fingerprint


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


@dataclass(frozen=True)
class _Binding:
    node: ast.stmt
    guard: str


class SourceFile:
    """One module's source.

    Attributes:
        module: the module's name.
        file: its path from the directory that holds the package, with slashes.
        path: its path.
        sha256: its hash.
    """

    def __init__(self, module: str, file: str, path: Path) -> None:
        self.module = module
        self.file = file
        self.path = path
        self._data = path.read_bytes()
        self.sha256 = hashlib.sha256(self._data).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree.

        Raises:
            SymbolAbsent: this Python cannot parse the file.
        """
        try:
            return ast.parse(self._data, filename=str(self.path))
        except SyntaxError as error:
            raise SymbolAbsent(f"{self.file} cannot be parsed: {error}") from error

    @cached_property
    def _bindings(self) -> dict[str, list[_Binding]]:
        return _bindings(self.tree.body)

    def top(self, name: str) -> list[_Binding]:
        """The bindings of a name at the module's top level."""
        return self._bindings.get(name, [])

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a `from … import` names."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        drop = node.level - (1 if self.path.name == "__init__.py" else 0)
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

    Attributes:
        package: the package's name.
        root: the directory that holds the package's folder.
    """

    def __init__(self, package: str, root: Path) -> None:
        self.package = package
        self.root = root
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

    def file(self, module: str) -> SourceFile | None:
        """A module's source, or None if the tree has no such file."""
        if module not in self._files:
            stem = module.replace(".", "/")
            found = None
            for file in (f"{stem}.py", f"{stem}/__init__.py"):
                if (self.root / file).is_file():
                    found = SourceFile(module, file, self.root / file)
                    break
            self._files[module] = found
        return self._files[module]

    def sha256(self, file: str) -> str | None:
        """The hash of a file given by its path from the root, or None if there is no such file."""
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        source = self.file(module)
        return source.sha256 if source is not None and source.file == file else None

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
        return _resolve(self, symbol, symbol, ())


def _resolve(tree: SourceTree, asked: str, symbol: str, seen: tuple[str, ...]) -> Symbol:
    if symbol in seen:
        raise SymbolAbsent(f"{symbol} leads back to itself")
    module, _, qualname = symbol.partition(":")
    source = tree.file(module)
    if source is None:
        raise SymbolAbsent(f"there is no module {module}")
    files = tuple(dict.fromkeys([*(_file_of(tree, item) for item in seen), source.file]))
    owners: list[ast.ClassDef] = []
    parts = qualname.split(".")
    for index, part in enumerate(parts):
        found = _bindings(owners[-1].body).get(part, []) if owners else source.top(part)
        defined = [item for item in found if not isinstance(item.node, ast.Import | ast.ImportFrom)]
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
            owners.append(owner)
    nodes = [item.node for item in defined]
    kind, decorators = _kind(nodes[-1])
    return Symbol(
        name=asked,
        defined_as=symbol,
        kind=kind,
        file=source.file,
        line=nodes[-1].lineno,
        decorators=decorators,
        body=fingerprint.body(nodes),
        interface=fingerprint.interface(nodes, [item.guard for item in defined], owners),
        files=files,
    )


def _file_of(tree: SourceTree, symbol: str) -> str:
    source = tree.file(symbol.partition(":")[0])
    return source.file if source is not None else ""


def _inherited(
    tree: SourceTree, asked: str, symbol: str, source: SourceFile, owner: ast.ClassDef, rest: str, seen: tuple[str, ...]
) -> Symbol:
    """Looks for an attribute in the bases of a class, in their order (not the full method resolution order)."""
    for base in owner.bases:
        where = _class_of(tree, source, base)
        if where is None:
            continue
        try:
            return _resolve(tree, asked, f"{where}.{rest}", seen)
        except SymbolAbsent:
            continue
    raise SymbolAbsent(f"class {owner.name} ({source.file}:{owner.lineno}) neither has nor visibly inherits {rest!r}")


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
            name = _alias(node, base.id).name
            if tree.file(module) is not None and tree.file(f"{module}.{name}") is None:
                return _definition(tree, module, ".".join([name, *names]))
            if names and tree.file(f"{module}.{name}") is not None:
                return _definition(tree, f"{module}.{name}", ".".join(names))
        if isinstance(node, ast.Import) and names:
            alias = _alias(node, base.id)
            dotted = [*(alias.name if alias.asname else base.id).split("."), *names]
            for cut in range(len(dotted) - 1, 0, -1):
                if tree.file(".".join(dotted[:cut])) is not None:
                    return _definition(tree, ".".join(dotted[:cut]), ".".join(dotted[cut:]))
    return None


def _definition(tree: SourceTree, module: str, qualname: str, hops: int = 0) -> str:
    """Follows `from x import y` from a module to the one that defines a name; stops where it can't be followed."""
    source = tree.file(module)
    first, _, rest = qualname.partition(".")
    if source is not None and hops < 20:
        found = source.top(first)
        if all(isinstance(item.node, ast.ImportFrom) for item in found):
            for item in found:
                if isinstance(item.node, ast.ImportFrom):
                    name = _alias(item.node, first).name
                    onward = f"{name}.{rest}" if rest else name
                    return _definition(tree, source.absolute(item.node), onward, hops + 1)
            for star in source.starred():
                other = tree.file(star)
                if other is not None and other.top(first):
                    return _definition(tree, star, qualname, hops + 1)
    return f"{module}:{qualname}"


def _imported(tree: SourceTree, source: SourceFile, name: str, rest: str, found: Sequence[_Binding]) -> SymbolAbsent:
    qualname = f"{name}.{rest}" if rest else name
    definition = _definition(tree, source.module, qualname)
    if definition != f"{source.module}:{qualname}":
        return SymbolMoved(f"{source.file} only imports it; it is defined at {definition}", definition)
    if found:
        return SymbolAbsent(f"{source.file}:{found[-1].node.lineno} imports {name!r} as a module")
    return SymbolAbsent(f"{source.file} has no {name!r}")


def _alias(node: ast.Import | ast.ImportFrom, bound: str) -> ast.alias:
    return next(alias for alias in node.names if _bound(node, alias) == bound)


def _bound(node: ast.stmt, alias: ast.alias) -> str:
    name = alias.asname or alias.name
    return name.partition(".")[0] if isinstance(node, ast.Import) and not alias.asname else name


def _kind(node: ast.stmt) -> tuple[str, int]:
    if isinstance(node, ast.ClassDef):
        return "class", len(node.decorator_list)
    if not isinstance(node, fingerprint.Function):
        return "value", 0
    names = [decorator.id if isinstance(decorator, ast.Name) else "" for decorator in node.decorator_list]
    attributes = [decorator.attr if isinstance(decorator, ast.Attribute) else "" for decorator in node.decorator_list]
    for name in ("staticmethod", "classmethod"):
        if name in names:
            return name, len(names) - 1
    if {"property", "cached_property"} & {*names, *attributes} or {"setter", "deleter", "getter"} & set(attributes):
        return "property", len(names)
    return "function", len(names)


def _bindings(statements: Sequence[ast.stmt]) -> dict[str, list[_Binding]]:
    """Every binding of every name in a scope, in the order of the source; `if`, `try`, `with` and loops are entered."""
    table: dict[str, list[_Binding]] = {}
    for node, guard in _statements(statements, ""):
        for name in _names(node):
            table.setdefault(name, []).append(_Binding(node, guard))
    return table


def _statements(statements: Sequence[ast.stmt], guard: str) -> Iterator[tuple[ast.stmt, str]]:
    for node in statements:
        yield node, guard
        if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
            continue
        kind = type(node).__name__
        test = fingerprint.normalise(node.test) if isinstance(node, ast.If | ast.While) else ""
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []), f"{guard}/{kind}.{field} {test}")
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, f"{guard}/{kind}.except {fingerprint.normalise(handler.type)}")


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*fingerprint.Function, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (_bound(node, alias) for alias in node.names)
    elif isinstance(node, ast.Assign):
        stored = (name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        yield from (name.id for name in stored if isinstance(name.ctx, ast.Store))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
