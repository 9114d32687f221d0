"""Builds what is installed: finds a target in its module, checks that it is the pinned original, makes ours."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from afdpatch.registry.errors import Conflict, PatchError, TargetAbsent, TargetDrifted
from afdpatch.registry.journal import MISSING, Slot
from afdpatch.registry.manifest import Entry
from afdpatch.registry.source import SourceTree, Symbol

_KIND_FLAGS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_DESCRIPTORS: dict[type, Callable[[FunctionType], Any]] = {
    FunctionType: lambda function: function,
    staticmethod: staticmethod,
    classmethod: classmethod,
}


@dataclass(frozen=True, eq=False)
class Built:
    """An entry that is ready to be put in effect.

    Attributes:
        entry: the entry.
        module: the target's module.
        original: the function that the target is now.
        slot: the target's slot with ours, not yet filled.
        install: for `install`, the function to call.
    """

    entry: Entry
    module: ModuleType | None = None
    original: Callable[..., Any] | None = None
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
        TargetDrifted: the replacement's signature or kind is not the original's.
        PatchError: the replacement cannot be imported or made.
    """
    replacement = load(entry, entry.replacement or "")
    if entry.kind == "install":
        return Built(entry=entry, install=replacement)
    owner, raw = _locate(entry, module)
    name = entry.qualname.rpartition(".")[2]
    original = _pinned_original(entry, raw, symbol, tree)
    make = _wrapped if entry.kind == "wrap" else _own_name
    ours = make(entry, replacement, original)
    _check_call(entry, original, ours)
    slot = Slot(owner, name, _DESCRIPTORS[type(raw)](ours))
    return Built(entry=entry, module=module, original=original, slot=slot)


def load(entry: Entry, name: str) -> Any:
    """Imports the object that an entry names as `module:Qualified.name`.

    Raises:
        PatchError: its module cannot be imported or has no such attribute.
    """
    module, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
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
    return value


def _locate(entry: Entry, module: ModuleType | None) -> tuple[Any, Any]:
    """The target's owner and what its `__dict__`, or that of a base, holds."""
    *outer, name = entry.qualname.split(".")
    owner: Any = module
    try:
        for part in outer:
            owner = vars(owner)[part]
        places = owner.__mro__ if isinstance(owner, type) else (owner,)
        raw = next(vars(place)[name] for place in places if name in vars(place))
    except (KeyError, StopIteration, TypeError) as error:
        raise TargetAbsent(
            "the imported module doesn't have the target",
            patch_id=entry.id,
            symbol=entry.target,
            expected="the attribute that its source defines",
            found=f"{type(error).__name__}: {error}",
            todo="see what removes it at import",
        ) from error
    return owner, raw


def _pinned_original(entry: Entry, raw: Any, symbol: Symbol, tree: SourceTree) -> FunctionType:
    """The target's function, after a check that nobody has put another in its place.

    A function is the original if its code is of the file that defines the target and has its name. A decorator of the
    package may have wrapped it: then the innermost `__wrapped__` is looked at, and no more layers than decorators.
    """
    function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    file = os.path.realpath(tree.root / symbol.file)
    layers, inner = 0, function
    while _is_function(inner) and layers < symbol.decorators and hasattr(inner, "__wrapped__"):
        inner, layers = inner.__wrapped__, layers + 1
    name = symbol.defined_as.rpartition(":")[2].rpartition(".")[2]
    if (
        type(raw) not in _DESCRIPTORS
        or not _is_function(function)
        or not _is_function(inner)
        or os.path.realpath(inner.__code__.co_filename) != file
        or inner.__code__.co_name != name
    ):
        raise Conflict(
            f"already changed by {owner_of(function)}",
            patch_id=entry.id,
            symbol=entry.target,
            expected=f"the {symbol.kind} {name} of {file}",
            found=describe(function),
            todo="remove the other patch, or apply it after ours",
        )
    return function


def _is_function(value: object) -> TypeGuard[FunctionType]:
    """Whether a value is a function itself; `isinstance` is also true for wrapt's proxies."""
    return type(value) is FunctionType


def owner_of(value: Any) -> str:
    """The module whose code an object runs, whatever name it was given by `functools.wraps`."""
    if _is_function(value):
        return str(value.__globals__.get("__name__", value.__code__.co_filename))
    wrapper = getattr(value, "_self_wrapper", None)
    if wrapper is not None:
        return owner_of(wrapper)
    return str(getattr(value, "__module__", None) or type(value).__module__)


def describe(value: Any) -> str:
    """An object in a few words, with the place of its code."""
    if _is_function(value):
        code = value.__code__
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    if value is MISSING:
        return "nothing"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


def _plain_function(entry: Entry, value: Any, what: str) -> FunctionType:
    if not _is_function(value):
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
    found: object = sys.modules.get(ours.__module__)
    for part in ours.__qualname__.split("."):
        found = getattr(found, part, None)
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
