"""Builds what is installed: finds a target in its module, checks that it is the pinned original, makes ours."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from afdpatch.registry import forms, references
from afdpatch.registry.errors import (
    HELD,
    HELD_EXPECTED,
    HELD_TODO,
    Conflict,
    NotInEffect,
    PatchError,
    TargetAbsent,
    TargetDrifted,
)
from afdpatch.registry.forms import describe, function_of, is_function, owner_of
from afdpatch.registry.journal import Slot, claimed
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceTree, Symbol
from afdpatch.registry.values import import_names

_KIND_FLAGS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, eq=False)
class Target:
    """A target as it stands in this process, and is the pinned original.

    Attributes:
        owner: the module or class whose slot is filled.
        name: the slot's name.
        raw: what the `__dict__` of the owner, or of the base that has it, holds.
        original: the function, class or value; of a property the getter.
        names: as `Record.names`.
    """

    owner: Any
    name: str
    raw: Any
    original: Any
    names: Callable[[str], tuple[str, ...]] | None = None


@dataclass(frozen=True, eq=False)
class Built:
    """An entry that is ready to be put in effect.

    Attributes:
        entry: the entry.
        module: the target's module.
        target: what the target is now.
        slot: the target's slot with ours, not yet filled.
        install: for `install`, the function to call.
    """

    entry: Entry
    module: ModuleType | None = None
    target: Target | None = None
    slot: Slot | None = None
    install: Callable[[], object] | None = None


def build(entry: Entry, module: ModuleType | None, symbol: Symbol, tree: SourceTree) -> Built:
    """Makes what an entry installs, and changes nothing.

    Args:
        entry: a `wrap`, `replace` or `install` entry.
        module: the target's module, imported; not needed for `install`.
        symbol: the target as the source has it.
        tree: the package's source.

    Raises:
        TargetAbsent: the imported module has no such attribute.
        Conflict: the attribute is not the pinned original any more.
        Unpatchable: it can't be patched soundly.
        NotInEffect: somebody would go on using the original.
        TargetDrifted: the replacement's signature or kind is not the original's.
        PatchError: the replacement cannot be imported or made.
    """
    if entry.kind == "install":
        return Built(entry=entry, install=load(entry, entry.replacement or ""))
    target = find(entry, module, symbol, tree)
    replacement = load(entry, entry.replacement or "")
    if symbol.kind in ("class", "value"):
        if symbol.kind == "class":
            forms.check_class(entry, target.original, replacement)
        else:
            forms.check_value(entry, target.raw, replacement)
        return Built(entry, module, target, Slot(target.owner, target.name, replacement))
    make = _wrapped if entry.kind == "wrap" else _own_name
    ours = make(entry, replacement, target.original)
    _check_call(entry, target.original, ours)
    installed = forms.shaped(target.raw, target.owner, target.name, ours)
    return Built(entry, module, target, Slot(target.owner, target.name, installed))


def load(entry: Entry, name: str) -> Any:
    """Imports the object that an entry names as `module:Qualified.name`.

    Raises:
        PatchError: its module cannot be imported or has no such attribute.
    """
    module, _, qualname = name.partition(":")
    try:
        return forms.attribute(importlib.import_module(module), qualname)
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(
            "the entry's own code cannot be imported",
            patch_id=entry.id,
            symbol=name,
            expected=f"a function {qualname} in {module}",
            found=f"{type(error).__name__}: {error}",
            todo="correct the module, or the manifest and then `afdpatch pin`",
        ) from error


# ---- the target ----------------------------------------------------------------------------------------------------


def find(entry: Entry, module: ModuleType | None, symbol: Symbol, tree: SourceTree) -> Target:
    """A target as it stands in this process; nothing is imported or changed.

    Raises:
        TargetAbsent: the imported module has no such attribute.
        Conflict: the attribute is not the pinned original any more.
        Unpatchable: it can't be patched soundly.
        NotInEffect: somebody holds the original and would go on using it.
    """
    owner, place, name = _locate(entry, module, symbol)
    # Counted before this frame holds the object too.
    plain = symbol.kind not in ("class", "value") and forms.form_of(vars(place)[name]) is not None
    excess = references.excess(place, name, function_of) if plain else 1
    raw = vars(place)[name]
    below = _below(entry, raw)
    if symbol.kind == "value":
        return _value(entry, owner, place, name, symbol, tree)
    if below is None:
        _check_original(entry, raw, symbol, tree)
    original = function_of(raw)
    if below is not None and below.kind == "replace":
        return Target(owner, name, raw, original)  # its own module holds it by its own name
    rebound = [item for item in references.module_names(original, entry.package) if _rebound(entry, item)]
    if symbol.kind == "class" or excess > len(rebound) or weakref.getweakrefcount(original):
        _check_left(entry, references.holders(original, place, name, _ours(entry), entry.holders))
    return Target(owner, name, raw, original)


def _locate(entry: Entry, module: ModuleType | None, symbol: Symbol) -> tuple[Any, Any, str]:
    """The target's owner, the module or class (the owner or a base of it) whose `__dict__` has it, and its name."""
    outer = _mangled(entry.qualname)[:-1]
    name = _mangled(symbol.defined_as.partition(":")[2])[-1]
    owner: Any = module
    try:
        for part in outer:
            owner = vars(owner)[part]
        places = owner.__mro__ if isinstance(owner, type) else (owner,)
        return owner, next(place for place in places if name in vars(place)), name
    except (KeyError, StopIteration, TypeError) as error:
        raise TargetAbsent(
            "the imported module doesn't have the target",
            patch_id=entry.id,
            symbol=entry.target,
            expected="the attribute that its source defines",
            found=f"{type(error).__name__}: {error}",
            todo="see what removes it at import",
        ) from error


def _mangled(qualname: str) -> list[str]:
    """The parts of a dotted name as they stand in each `__dict__`: Python gives private names that of their class."""
    parts = qualname.split(".")
    owners = ["", *(part.lstrip("_") for part in parts)]
    private = [part.startswith("__") and not part.endswith("__") for part in parts]
    return [
        f"_{owner}{part}" if owner and hidden else part
        for part, owner, hidden in zip(parts, owners, private, strict=False)
    ]


def _below(entry: Entry, raw: Any) -> Entry | None:
    """The entry of another set whose object stands in the slot, if ours declares that it comes after it."""
    claim = claimed(raw)
    if claim is None:
        return None
    manifest, record = claim
    if f"{manifest}/{record.entry_id}" in entry.after:
        return record.entry
    raise Conflict(
        f"patched by {manifest}/{record.entry_id} already, and no order of the two is declared",
        patch_id=entry.id,
        symbol=entry.target,
        expected=f"the original, or `after: [{manifest}/{record.entry_id}]` in the entry",
        found=describe(raw),
        todo="declare the order in the manifest that comes second, or use one of the two",
    )


def _check_original(entry: Entry, raw: Any, symbol: Symbol, tree: SourceTree) -> None:
    """Makes sure that nobody has put another object in the place of the pinned one.

    A function is the original if its code is of the file that defines the target and has its name. A decorator of the
    package may have wrapped it: then the innermost `__wrapped__` is looked at, and no more layers than decorators.
    """
    file = os.path.realpath(tree.root / symbol.file)
    module, _, qualname = symbol.defined_as.partition(":")
    refusal = forms.unpatchable(entry, raw)
    if refusal is not None and symbol.decorators:  # without a decorator, somebody else has put it there
        raise refusal
    function = function_of(raw)
    if symbol.kind == "class":
        right = isinstance(raw, type) and (raw.__module__, raw.__qualname__) == (module, qualname)
    else:
        inner, layers = function, 0
        while is_function(inner) and layers < symbol.decorators and hasattr(inner, "__wrapped__"):
            inner, layers = inner.__wrapped__, layers + 1
        right = (
            forms.form_of(raw) is not None
            and is_function(function)
            and is_function(inner)
            and os.path.realpath(inner.__code__.co_filename) == file
            and inner.__code__.co_name == qualname.rpartition(".")[2]
        )
    if not right:
        raise Conflict(
            f"already changed by {owner_of(raw)}",
            patch_id=entry.id,
            symbol=entry.target,
            expected=f"the {symbol.kind} {qualname.rpartition('.')[2]} of {file}",
            found=describe(raw),
            todo="remove the other patch, or apply it after ours",
        )


def _value(entry: Entry, owner: Any, place: Any, name: str, symbol: Symbol, tree: SourceTree) -> Target:
    forms.check_field(entry, owner, name)
    raw = vars(place)[name]
    source = tree.file(entry.module)
    once = "." not in entry.qualname and source is not None and len(source.top(name)) == 1
    stated = tree.constants(entry.module).get(name, raw) if once else raw
    if type(stated) is not type(raw) or repr(stated) != repr(raw):
        raise Conflict(
            "already changed",
            patch_id=entry.id,
            symbol=entry.target,
            expected=f"{stated!r}, as {symbol.file} has it",
            found=repr(raw),
            todo="remove the other patch, or apply it after ours",
        )
    if not isinstance(raw, forms.SHARED):
        _check_left(entry, references.holders(raw, place, name, _ours(entry), entry.holders))
        return Target(owner, name, raw, raw)
    from afdpatch.registry.keepers import readings_of  # a reader of source: nothing but a number needs it

    names = import_names(tree, entry, place)
    others = [(name, module) for name, module in references.loaded(entry.package) if name not in entry.holders]
    # A module that is being imported and hasn't come to its import yet will get ours.
    left = [f"{name}.{held}" for name, module in others for held in names(name) if held in vars(module)]
    read = readings_of(tree, entry.target, [entry.module, *filter(references.has_run, entry.holders)])
    _check_left(entry, [*left, *map(str, read)])
    return Target(owner, name, raw, raw, names)


def _rebound(entry: Entry, name: str) -> bool:
    """Whether a module's name for the original is the target's own, is rebound with it, or is ours."""
    module = name.rpartition(".")[0]
    return name == f"{entry.module}.{entry.qualname}" or module in entry.holders or _ours(entry)(module)


def _ours(entry: Entry) -> Callable[[str], bool]:
    package = (entry.replacement or "").partition(":")[0].partition(".")[0]
    return lambda module: module.partition(".")[0] == package


def _check_left(entry: Entry, left: list[str]) -> None:
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise NotInEffect(
            HELD,
            patch_id=entry.id,
            symbol=entry.target,
            expected=HELD_EXPECTED,
            found=shown,
            todo=HELD_TODO,
        )


# ---- ours ----------------------------------------------------------------------------------------------------------
def _plain_function(entry: Entry, value: Any, what: str) -> FunctionType:
    if not is_function(value):
        raise PatchError(
            f"{what} is not a plain function",
            patch_id=entry.id,
            symbol=entry.replacement,
            expected="types.FunctionType (torch.compile ignores proxies of functions)",
            found=describe(value),
            todo="let it be a function made by def",
        )
    return value


def _wrapped(entry: Entry, factory: Any, original: FunctionType) -> FunctionType:
    try:
        made = factory(original)
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(
            "its factory failed",
            patch_id=entry.id,
            symbol=entry.replacement,
            found=f"{type(error).__name__}: {error}",
            todo="correct the factory",
        ) from error
    ours = _plain_function(entry, made, "what its factory returned")
    if ours is original:
        raise PatchError("its factory returned the original", patch_id=entry.id, symbol=entry.replacement)
    if vars(ours).get("__wrapped__") is not original:
        functools.update_wrapper(ours, original)
    return ours


def _own_name(entry: Entry, value: Any, original: FunctionType) -> FunctionType:
    """Checks a `replace` function: that its own name leads to it, so that it pickles."""
    ours = _plain_function(entry, value, "the replacement")
    found: object
    try:
        found = forms.attribute(sys.modules.get(ours.__module__), ours.__qualname__)
    except AttributeError:
        found = None
    if found is not ours:
        raise PatchError(
            "the replacement's own name doesn't lead to it, so it wouldn't pickle",
            patch_id=entry.id,
            symbol=entry.replacement,
            expected=f"{ours.__module__}:{ours.__qualname__} to be it",
            found=describe(found),
            todo="define it at its module's top level",
        )
    return ours


def _check_call(entry: Entry, original: FunctionType, ours: FunctionType) -> None:
    expected, found = inspect.signature(original), inspect.signature(ours, follow_wrapped=False)
    if _shape(expected) != _shape(found) or not _same_defaults(expected, found):
        message, pair = "the replacement's signature differs", (f"({_text(expected)})", f"({_text(found)})")
    elif (original.__code__.co_flags ^ ours.__code__.co_flags) & _KIND_FLAGS:
        message, pair = "the replacement is of another kind", (_kind(original), _kind(ours))
    else:
        return
    raise TargetDrifted(
        message,
        patch_id=entry.id,
        symbol=entry.replacement,
        expected=pair[0],
        found=pair[1],
        todo=f"write the replacement with the signature of {entry.target}",
    )


def _shape(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.kind) for parameter in signature.parameters.values()]


def _same_defaults(one: inspect.Signature, other: inspect.Signature) -> bool:
    pairs = zip(one.parameters.values(), other.parameters.values(), strict=True)
    return all(_same(left.default, right.default) for left, right in pairs)


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    return type(left) is type(right) and repr(left) == repr(right)


def _text(signature: inspect.Signature) -> str:
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))[1:-1]


def _kind(function: FunctionType) -> str:
    flags = function.__code__.co_flags
    for flag, name in (
        (inspect.CO_COROUTINE, "coroutine function"),
        (inspect.CO_ASYNC_GENERATOR, "async generator function"),
        (inspect.CO_GENERATOR, "generator function"),
    ):
        if flags & flag:
            return name
    return "plain function"
