"""Who else holds an object: what would go on using the original behind a patch's back.

Names in modules are only the commonest way. A `functools.partial`, a default argument, a table, a bound method kept by
an instance, a cache or an alias in a class keep an original as well, and assigning to its slot doesn't reach them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import (
    CellType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

DEPTH = 8
"""How many containers are climbed from an object to a name; what lies deeper counts as a holder that isn't known."""
CLIMBS = 200
"""How many objects are asked for their holders in one search, so that it ends; what is left counts likewise."""
_CACHE = type(functools.lru_cache(len))
_KINDS: dict[type, str] = {
    functools.partial: "functools.partial",
    functools.partialmethod: "functools.partialmethod",
    MethodType: "bound method",
    staticmethod: "staticmethod",
    classmethod: "classmethod",
    property: "property",
    functools.cached_property: "cached_property",
    _CACHE: "functools cache",
}
_PASSING = ("generator", "list_iterator", "tuple_iterator", "dict_itemiterator", "coroutine", "async_generator")
_TYPING = ("typing", "typing_extensions")
_OWN = ""
"""Stands for the slot itself among the names."""
_CONTAINERS = ("list", "tuple", "set", "frozenset", "deque", "cell", "mappingproxy", "OrderedDict", "defaultdict")


def excess(owner: Any, name: str, function_of: Callable[[Any], Any]) -> int:
    """How many references there are to a slot's object and its function beside those that a fresh slot has.

    It takes microseconds, a scan some ten milliseconds in a process that has vLLM: scan only if this isn't 0.
    """

    def fresh(*args: Any) -> None:
        return None

    form = type(vars(owner)[name])
    dummy = type("Dummy", (), {"slot": fresh if form is FunctionType else form(fresh)})
    del fresh
    return _count(owner, name, function_of) - _count(dummy, "slot", function_of)


def _count(owner: Any, name: str, function_of: Callable[[Any], Any]) -> int:
    raw = vars(owner)[name]
    function = function_of(raw)
    return sys.getrefcount(raw) + sys.getrefcount(function)


def holders(
    value: object, owner: Any, name: str, ignored: Callable[[str], bool], swept: Collection[str] = ()
) -> list[str]:
    """Everything that holds an object, beside its slot, each in a few words.

    A weak reference counts too: what is put in the object's place keeps it alive. Of a class neither they do, since its
    bases have one, nor what it is made of, subclasses, instances and annotations.

    Frames are not counted, nor are containers that only frames hold: the locals of a running function. A search that
    comes to its limits says so as one more holder: it never passes for a complete one.

    Args:
        value: the object.
        owner: the module or class whose slot holds it rightly.
        name: that slot's name.
        ignored: asked with a module's name: what is in that module, or of a function of it, is left out.
        swept: modules whose names for the object are rebound, and don't count.
    """
    search = _Search(owner, name, ignored, swept)
    found = set(search.climb(value, "", DEPTH))
    for reference in () if isinstance(value, type) else weakref.getweakrefs(value):
        found |= set(search.climb(reference, "weak reference, ", DEPTH))
    return sorted(found - {_OWN})


class _Search:
    def __init__(self, owner: Any, name: str, ignored: Callable[[str], bool], swept: Collection[str]) -> None:
        self._swept = swept
        self._owner = owner
        self._name = name
        self._ignored = ignored
        self._seen: set[int] = set()
        self._lists: set[int] = set()

    def climb(self, value: object, via: str, depth: int) -> Iterator[str]:
        """The names that lead to an object; `via` is what lies between the original and it."""
        if id(value) in self._seen:
            return
        if depth == 0 or len(self._seen) >= CLIMBS:
            # Fail closed: whoever is behind this may go on using the original.
            limit = f"{DEPTH} containers" if depth == 0 else f"{CLIMBS} objects"
            yield f"{via if depth == 0 else ''}holders that aren't known: the search ends after {limit}"
            return
        self._seen.add(id(value))
        with self._referrers(value) as referrers:
            for referrer in referrers:
                passing = isinstance(referrer, FrameType) or type(referrer).__name__ in _PASSING
                if id(referrer) not in self._lists and not passing:
                    yield from self._held_by(referrer, value, via, depth)

    @contextmanager
    def _referrers(self, value: object) -> Iterator[list[Any]]:
        """What refers to an object. On Python 3.10 the frame that has this list is in it: a cycle, if it stayed."""
        found = gc.get_referrers(value)
        self._lists.add(id(found))
        try:
            yield found
        finally:
            found.clear()

    def _held_by(self, referrer: Any, value: object, via: str, depth: int) -> Iterator[str]:
        kind = type(referrer)
        if kind.__module__.startswith("afdpatch.registry") or (isinstance(value, type) and _part(referrer, value)):
            return
        if isinstance(referrer, ModuleType):
            return  # its namespace, a dictionary, is a referrer too
        if isinstance(referrer, type):
            yield from self._class(referrer, value, via)
        elif isinstance(referrer, FunctionType):
            module = str(referrer.__globals__.get("__name__", ""))
            # What else it refers to: its namespace, a dictionary of its own, its annotations as they were written.
            if (value is referrer.__defaults__ or value is referrer.__closure__) and not self._ignored(module):
                yield f"{via}a default argument or closure of {module}.{referrer.__qualname__}"
        elif kind in _KINDS:
            if id(referrer) in self._seen or _only_says(referrer, value):
                return  # found by its other way: it refers to what it holds itself, or by its `__dict__`
            inner = list(self.climb(referrer, f"{via}{_KINDS[kind]}, ", depth - 1))
            yield from inner or [f"{via}{_KINDS[kind]} that has no name"]
        elif kind is dict:
            yield from self._dict(referrer, value, via, depth)
        elif kind.__name__ in _CONTAINERS:
            what = "" if kind.__name__ in ("cell", "mappingproxy") else f"{kind.__name__}, "
            yield from self.climb(referrer, via + what, depth - 1)
        elif not _only_says(referrer, value):
            yield f"{via}an attribute of an object of {kind.__module__}.{kind.__qualname__}"

    def _class(self, owner: type, value: object, via: str) -> Iterator[str]:
        for name in _names(vars(owner), value):
            if owner is self._owner and name == self._name:
                yield _OWN
            elif not self._ignored(owner.__module__):
                yield f"{via}{owner.__module__}.{owner.__qualname__}.{name}"

    def _dict(self, referrer: dict[Any, Any], value: object, via: str, depth: int) -> Iterator[str]:
        module = referrer.get("__name__")
        if isinstance(module, str) and vars(sys.modules.get(module, object)) is referrer:
            for name in _names(referrer, value):
                own = sys.modules[module] is self._owner and name == self._name
                if own or not (self._ignored(module) or (not via and module in self._swept)):
                    yield _OWN if own else f"{via}{module}.{name}"
            return
        keys = [key for key, held in list(referrer.items()) if held is value]
        key = f"[{keys[0]!r}]" if keys and isinstance(keys[0], str) else ""
        with self._referrers(referrer) as referrers:
            for above in referrers:
                if isinstance(above, type) and vars(above).get(keys[0] if keys else "") is value:
                    yield from self._class(above, value, via)
                    return
                if isinstance(above, FunctionType):
                    home = str(above.__globals__.get("__name__", ""))
                    if not (self._ignored(home) or above.__annotations__ is referrer):
                        yield f"{via}an attribute of {home}.{above.__code__.co_name}"
                    return
                if vars_of(above) is referrer and type(above) in _KINDS:
                    yield from self._held_by(above, value, via, depth)
                    return
                if vars_of(above) is referrer:
                    if not (type(above).__module__.startswith("afdpatch.registry") or _only_says(above, value)):
                        yield f"{via}an attribute of an object of {type(above).__module__}.{type(above).__qualname__}"
                    return
        yield from self.climb(referrer, f"{via}dict{key}, ", depth - 1)


def _names(namespace: Mapping[str, Any], value: object) -> list[str]:
    return [name for name, held in list(namespace.items()) if held is value and name != "__annotations__"]


def _part(referrer: Any, owner: type) -> bool:
    """Whether it refers to a class since it is a part, a subclass or an instance of it."""
    kind = type(referrer)
    if kind is tuple:
        return any(referrer is bases for item in _family(owner) for bases in (item.__mro__, item.__bases__))
    if kind in (GetSetDescriptorType, MemberDescriptorType):
        return referrer.__objclass__ is owner
    return kind is owner or (kind is CellType and _for_super(referrer))


def _family(owner: type) -> Iterator[type]:
    yield owner
    subclasses: list[type] = type.__subclasses__(owner)
    for item in subclasses:
        yield from _family(item)


def _for_super(cell: CellType) -> bool:
    """Whether a cell is the one by which a class's methods know it."""
    closures = [item for item in gc.get_referrers(cell) if type(item) is tuple]
    functions: list[Any] = [
        item for cells in closures for item in gc.get_referrers(cells) if type(item) is FunctionType
    ]
    return any(
        name == "__class__" and item is cell
        for function in functions
        for name, item in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )


def _only_says(referrer: Any, value: object) -> bool:
    """Whether nobody uses what it holds: a class in an annotation or typing's cache of those, a `ClassVar`'s value."""
    kind = type(referrer)
    if kind is dataclasses.Field:
        of_class = referrer._field_type is dataclasses._FIELD_CLASSVAR  # type: ignore[attr-defined]
        return of_class or (value is referrer.type and value is not referrer.default_factory)
    if kind in (GenericAlias, UnionType) or kind.__module__ in _TYPING:
        return getattr(referrer, "__origin__", None) is not value
    return kind is _CACHE and getattr(referrer, "__module__", "") in _TYPING


def module_names(value: object, package: str | None = None) -> list[str]:
    """The names, as `module.name`, by which modules (of one package) hold an object."""
    modules = loaded(package)
    return [f"{name}.{key}" for name, module in modules for key, held in list(vars(module).items()) if held is value]


def loaded(package: str | None = None) -> list[tuple[str, ModuleType]]:
    """The imported modules (of one package), by their names."""
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and package in (None, name.partition(".")[0])
    ]


def has_run(module: str) -> bool:
    """Whether a module has been imported, and not only begun."""
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)


def vars_of(value: object) -> object:
    """An object's `__dict__` if it has one of its own, else None."""
    try:
        return vars(value)
    except TypeError:
        return None


def instances(owner: type) -> int:
    """How many objects of a class itself, not of a subclass, are alive."""
    return sum(1 for item in gc.get_referrers(owner) if type(item) is owner)
