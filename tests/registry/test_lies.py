"""Attempts to make the registry say that all is well where it isn't, or the other way round."""

from __future__ import annotations

import pytest

from afdpatch.registry import Conflict, PatchError, PatchSet
from tests.registry.conftest import World

BASE = '''
import sys
from typing import TYPE_CHECKING, overload


def deco(f):
    return f


def helper(x):
    """Text."""
    return x


def free(x, scale=2):
    """Text."""
    return helper(x) * scale
'''
# What is done to the source of `free`: (old, new)
SAME: dict[str, tuple[str, str]] = {
    "comment": ("    return helper", "    # why\n    return helper"),
    "docstring": ('    """Text."""\n    return helper', '    """Other\n\n    text."""\n    return helper'),
    "docstring gone": ('    """Text."""\n    return helper', "    return helper"),
    "blank lines": ("    return helper", "\n\n    return helper"),
    "layout": ("helper(x) * scale", "(\n        helper(\n            x,\n        )\n        * scale\n    )"),
    "another name above": ("def deco", "OTHER = 1\n\n\ndef deco"),
    "a comprehension's variable": ("def deco", "L = [free for free in ()]\n\n\ndef deco"),
    "a lambda's parameter": ("def deco", "L = lambda free: (free := 1)\n\n\ndef deco"),
    "a local variable": ("def deco", "def other():\n    free = 1\n    return free\n\n\ndef deco"),
    "an attribute of its name": ("def deco", "helper_1 = sys\nhelper_1.free = 1\n\n\ndef deco"),
    "a deleted other name": ("def deco", "OTHER = 1\ndel OTHER\n\n\ndef deco"),
}
CHANGED: dict[str, tuple[str, str, int]] = {
    "body": ("* scale", "* scale * 1", 4),
    "number's type": ("scale=2", "scale=2.0", 4),
    "text for bytes": ("* scale", "* scale if b'' else ''", 4),
    "annotation": ("x, scale=2", "x: int, scale=2", 4),
    "keyword only": ("x, scale=2", "x, *, scale=2", 4),
    "async": ("def free", "async def free", 4),
    "decorator": ("def free", "@deco\ndef free", 4),
    "under TYPE_CHECKING": ("def free", "if TYPE_CHECKING:\n    def free(x): ...\n\n\ndef free", 4),
    "under a platform": ("def free", "if sys.platform == 'win32':\n    def free(x): ...\n\n\ndef free", 4),
    "with overloads": ("def free", "@overload\ndef free(x: int) -> int: ...\n\n\ndef free", 4),
    "twice, the last counts": ("* scale\n", "* scale\n\n\ndef free(x, scale=2):\n    return 0\n", 4),
    "assigned afterwards": ("* scale\n", "* scale\n\n\nfree = deco(free)\n", 4),
    "annotated afterwards": ("* scale\n", "* scale\n\n\nfree: object = deco(free)\n", 4),
    "augmented afterwards": ("* scale\n", "* scale\n\n\nfree += 1\n", 4),
    "a loop's variable": ("* scale\n", "* scale\n\n\nfor free in (): ...\n", 4),
    "a with's name": ("* scale\n", "* scale\n\n\nwith open('x') as free: ...\n", 4),
    "in a walrus": ("* scale\n", "* scale\n\n\nif (free := deco(free)): ...\n", 4),
    "in a match": ("* scale\n", "* scale\n\n\nmatch 1:\n    case free: ...\n", 4),
    "defined in a match": ("* scale\n", "* scale\n\n\nmatch 1:\n    case 1:\n        def free(x, scale=2): ...\n", 4),
    "unpacked afterwards": ("* scale\n", "* scale\n\n\n(free, *_) = [deco]\n", 4),
    "a class of its name": ("* scale\n", "* scale\n\n\nclass free: ...\n", 4),
    "imported afterwards": ("* scale\n", "* scale\n\n\nfrom .other import free\n", 3),
    "a module of its name": ("* scale\n", "* scale\n\n\nimport json as free\n", 3),
    "by a star afterwards": ("* scale\n", "* scale\n\n\nfrom .other import *\n", 3),
    "by a star of a star afterwards": ("* scale\n", "* scale\n\n\nfrom .star import *\n", 3),
    "deleted": ("* scale\n", "* scale\n\n\ndel free\n", 3),
    "deleted under if": ("* scale\n", "* scale\n\n\nif sys:\n    del free\n", 3),
    "an exception's name": ("* scale\n", "* scale\n\n\ntry: ...\nexcept OSError as free: ...\n", 4),
    "set by globals": ("* scale\n", "* scale\n\n\nglobals()['free'] = deco\n", 0),
    "by __getattr__": ("def free", "def __getattr__(name): return helper\n\n\ndef freed", 3),
    "gone": ("def free", "def freed", 3),
    "only imported": ("def free", "from .other import free\n\n\ndef freed", 3),
    "broken": ("def free", "def (", 3),
}


def edited(world: World, old: str, new: str) -> None:
    text = world.text(BASE)
    assert text.count(old) >= 1, old
    at = text.rindex(old) if not new.startswith(old) or "helper" in old else text.index(old)
    world.write(f"{world.package}/core.py", text[:at] + new + text[at + len(old) :])


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.package}/other.py", "def free(x, scale=2): return 'other'\n")
    world.write(f"{world.package}/star.py", "from .other import *\n")
    world.declare(world.entry(kind="official", when="always"))
    assert (world.pin(), world.verify()) == (0, 0)
    return world


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_is_no_drift(pinned: World, name: str) -> None:
    edited(pinned, *SAME[name])
    assert pinned.verify() == 0


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_something_is_never_passed_over(pinned: World, name: str) -> None:
    old, new, code = CHANGED[name]
    edited(pinned, old, new)
    assert pinned.verify() == code


@pytest.mark.parametrize("how", ["crlf", "cr", "bom", "latin-1", "no newline at the end", "form feed", "tabs"])
def test_line_ends_and_encodings_are_no_drift(pinned: World, how: str) -> None:
    path = pinned.site / pinned.package / "core.py"
    data = path.read_bytes()
    changed = {
        "crlf": data.replace(b"\n", b"\r\n"),
        "cr": data.replace(b"\n", b"\r"),
        "bom": b"\xef\xbb\xbf" + data,
        "latin-1": b"# -*- coding: latin-1 -*-\n# \xe9\n" + data,
        "no newline at the end": data.rstrip(),
        "form feed": data.replace(b"\n\n\n", b"\n\x0c\n\n"),
        "tabs": data.replace(b"    ", b"\t"),
    }[how]
    assert changed != data
    path.write_bytes(changed)
    assert pinned.verify() == 0


@pytest.mark.parametrize("name", [name for name, case in CHANGED.items() if name not in ("under a platform", "broken")])
def test_what_verify_lets_pass_or_not_is_never_patched_in_silence(world: World, name: str) -> None:
    """Pinned as it is, if it can be; then whatever stands there at run time is patched, or it is an error."""
    old, new, _ = CHANGED[name]
    world.write(f"{world.package}/core.py", BASE)
    world.write(f"{world.package}/other.py", "def free(x, scale=2): return 'other'\n")
    edited(world, old, new)
    world.declare(world.entry())
    if world.pin() != 0:
        return
    patches = PatchSet.load(world.ours)
    try:
        patches.apply(role="red", process="worker")
        core = world.load("PKG.core")
    except (PatchError, TypeError, OSError):  # the module itself may fail
        return
    assert core.free(1)[0] == "ours" and core.free is not patches.original("core.free")


def test_what_globals_puts_there_is_found_at_run_time(pinned: World) -> None:
    edited(pinned, *CHANGED["set by globals"][:2])
    pinned.declare(pinned.entry())
    assert (pinned.pin(), pinned.verify()) == (0, 0)
    with pytest.raises(Conflict, match="already changed"):
        PatchSet.load(pinned.ours).apply(role="red", process="worker")


def test_a_method_that_its_own_module_replaces_is_drift(world: World) -> None:
    world.declare(world.entry("PKG.core:Engine.run", kind="official"))
    assert world.pin() == 0
    path = world.site / world.package / "core.py"
    path.write_text(path.read_text() + "\n\nEngine.make = helper\n")
    assert world.verify() == 0
    path.write_text(path.read_text() + "\n\nEngine.run = helper\n")
    assert world.verify() == 4
