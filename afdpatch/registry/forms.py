"""The forms that a target has at run time, and how a function of ours takes the same form.

What can't be replaced soundly is refused here, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from afdpatch.registry import references
from afdpatch.registry.errors import HELD, HELD_EXPECTED, HELD_TODO, NotInEffect, Unpatchable
from afdpatch.registry.journal import MISSING
from afdpatch.registry.manifest import Entry
from afdpatch.registry.unsound import REASONS

SHARED = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset)
"""Types of values that may be one object for many reasons: who holds one says nothing of where it was got."""
_FORMS: dict[type, str] = {
    FunctionType: "function",
    staticmethod: "staticmethod",
    classmethod: "classmethod",
    property: "property",
    functools.cached_property: "cached_property",
}


def is_function(value: object) -> TypeGuard[FunctionType]:
    """Whether a value is a function itself; `isinstance` is also true for wrapt's proxies."""
    return type(value) is FunctionType


def form_of(raw: Any) -> str | None:
    """`function`, `staticmethod`, `classmethod`, `property` or `cached_property`; None for any other object."""
    return _FORMS.get(type(raw))


def attribute(value: Any, qualname: str) -> Any:
    """What a dotted name leads to from an object. Raises AttributeError where it doesn't."""
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def function_of(raw: Any) -> Any:
    """The function in a target as it stands in a `__dict__`: a property's getter, a static method's function."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    if type(raw) is property:
        return raw.fget
    if type(raw) is functools.cached_property:
        return raw.func
    return raw


def shaped(raw: Any, owner: Any, name: str, ours: FunctionType) -> Any:
    """Our function in the form of what it replaces. A property keeps its setter and its deleter."""
    if type(raw) is property:
        return property(ours, raw.fset, raw.fdel, raw.__doc__)
    if type(raw) is functools.cached_property:
        made = functools.cached_property(ours)
        made.__set_name__(owner, name)
        return made
    return type(raw)(ours) if isinstance(raw, staticmethod | classmethod) else ours


def unpatchable(entry: Entry, raw: Any) -> Unpatchable | None:
    """Why an object that the pinned source defines as a function can't be patched, or None if it can."""
    kind = f"{type(raw).__module__}.{type(raw).__qualname__}"
    reason = REASONS.get(kind)
    if reason is None:
        return None
    return Unpatchable(
        "it can't be patched soundly",
        patch_id=entry.id,
        symbol=entry.target,
        expected="a function, a static or class method, a property, a class or a value",
        found=f"an object of {kind}: {reason}",
    )


# ---- classes and values --------------------------------------------------------------------------------------------


def check_class(entry: Entry, original: type, ours: Any) -> None:
    """Makes sure that everybody who asks for a class by name gets ours, and that nobody is left with the old one.

    Raises:
        Unpatchable: ours is no subclass of it or is abstract where it isn't.
        NotInEffect: subclasses or instances of it exist already; they are named.
    """
    if not (isinstance(ours, type) and issubclass(ours, original) and ours is not original):
        raise Unpatchable(
            "a class is replaced by a subclass of it only, so that isinstance holds both ways round in old code",
            patch_id=entry.id,
            symbol=entry.replacement,
            expected=f"a subclass of {entry.target}",
            found=repr(ours),
            todo="subclass it, or patch its methods in place",
        )
    extra: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset()) - getattr(
        original, "__abstractmethods__", frozenset()
    )
    if extra:
        names = ", ".join(sorted(extra))
        raise Unpatchable("it is abstract", patch_id=entry.id, symbol=entry.replacement, found=names)
    subclasses: list[type] = original.__subclasses__()
    left = [f"{item.__module__}.{item.__qualname__}" for item in subclasses if item is not ours]
    alive = references.instances(original)
    if left or alive:
        found = [f"subclasses: {', '.join(sorted(left))}"] if left else []
        found += [f"{alive} instance(s) of it"] if alive else []
        raise NotInEffect(
            HELD, patch_id=entry.id, symbol=entry.target, expected=HELD_EXPECTED, found="; ".join(found), todo=HELD_TODO
        )


def check_field(entry: Entry, owner: Any, name: str) -> None:
    """Makes sure that a value can be replaced by assigning to its name.

    Raises:
        Unpatchable: it is a field of a dataclass, a model, an enumeration or a named tuple.
    """
    what = _field_of(owner, name) if isinstance(owner, type) else None
    if what is not None:
        raise Unpatchable(
            f"it is a field of {what}, whose default was taken when the class was made",
            patch_id=entry.id,
            symbol=entry.target,
            found=f"{owner.__qualname__}.{name}",
            todo="patch __init__ or __post_init__, if the class has one",
        )


def _field_of(owner: type, name: str) -> str | None:
    """What has made a field of a class's value, or None; one that is annotated as `ClassVar` is none."""
    field = getattr(owner, "__dataclass_fields__", {}).get(name)
    if field is not None and field._field_type is not dataclasses._FIELD_CLASSVAR:  # type: ignore[attr-defined]
        return "a dataclass"
    of_class = getattr(owner, "__class_vars__", None)  # models have it, pydantic's dataclasses don't
    annotated = set() if of_class is None else set(getattr(owner, "__annotations__", ())) - of_class
    if name in annotated or name in (getattr(owner, "__pydantic_fields__", None) or ()):
        return "a pydantic model"
    marks = {"_member_map_": "an enumeration", "_field_defaults": "a named tuple"}
    return next((what for mark, what in marks.items() if name in getattr(owner, mark, ())), None)


def check_value(entry: Entry, raw: Any, ours: Any) -> None:
    """Makes sure that a value of ours can stand for the original.

    Raises:
        Unpatchable: it is of another type.
    """
    if type(raw) is not type(ours):
        raise Unpatchable(
            "the replacement is of another type",
            patch_id=entry.id,
            symbol=entry.replacement,
            expected=f"{type(raw).__module__}.{type(raw).__qualname__}",
            found=f"{type(ours).__module__}.{type(ours).__qualname__}",
        )


# ---- words ---------------------------------------------------------------------------------------------------------


def owner_of(value: Any) -> str:
    """The module whose code an object runs, whatever name it was given by `functools.wraps`."""
    value = function_of(value)
    if is_function(value):
        return str(value.__globals__.get("__name__", value.__code__.co_filename))
    wrapper = getattr(value, "_self_wrapper", None)
    if wrapper is not None:
        return owner_of(wrapper)
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value, "__module__", None) or type(value).__module__)


def describe(value: Any) -> str:
    """An object in a few words, with the place of its code."""
    value = function_of(value)
    if is_function(value):
        code = value.__code__
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    if value is MISSING:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
