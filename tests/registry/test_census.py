"""Holders and vanished symbols, found in source."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from afdpatch.registry import Lock, lock_path
from afdpatch.registry.census import holders_of
from afdpatch.registry.moved import Likeness, find_moved
from afdpatch.registry.source import SourceTree
from tests.registry.conftest import World

HOLDS = {
    "plain": "from PKG.core import free",
    "renamed": "from .core import helper, free as other",
    "guarded": "try:\n    from .core import free\nexcept ImportError:\n    free = None",
    "under_else": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1\nelse:\n    from .core import free",
    "in_class": "class A:\n    from .core import free",
    "in_match": "match 1:\n    case 1:\n        from .core import free",
    "starred": "from .core import *",
    "through": "from .plain import free",
    "through_star": "from .starred import free",
    "star_of_star": "from PKG.starred import *",
    "renamed_again": "from .renamed import other as third",
    "of_either": "from .guarded import free",
    "one_of_two": "try:\n    from .other import free\nexcept ImportError:\n    from .core import free",
    "of_one_of_two": "from .one_of_two import free",
    "of_one_under_if": "from .under_if import free as f",
    "under_if": "if X:\n    from .core import free\nelse:\n    def free(): ...",
    "star_of_either": "from .guarded import *",
    "star_without_spaces": "from.core import*",
    "star_of_package": "from .import *",
    "star_of_package_in_two_lines": "from .\\\n    import *",
    "star_with_a_space_in_its_name": "from . core import *",
    "star_with_spaces": "from .core  import   *",
    "star_in_two_lines": "from .core \\\n    import \\\n    *",
    "many": "from .core import (\n    helper,\n    free,  # a comment\n)",
}
HOLDS_NOT = {
    "checked_and": "import sys, typing\nif typing.TYPE_CHECKING and sys:\n    from .core import free",
    "checked": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .core import free",
    "late": "def f():\n    from .core import free\n    return free()",
    "method": "class A:\n    def f(self):\n        from .core import free",
    "module": "from . import core\ncore.free",
    "text": "'''from .core import free'''\n# from .core import free",
    "another": "from .other import free",
    "other": "def free(): ...",
    "longer": "from .core import helper as freed",
    "broken": "from .core import free\ndef (",
}


@pytest.fixture
def tree(world: World) -> SourceTree:
    for name, source in (HOLDS | HOLDS_NOT).items():
        world.write(f"{world.package}/{name}.py", source)
    world.write(f"{world.package}/__init__.py", "from .core import free")
    return SourceTree.at(world.package, world.site)


def test_every_kind_of_holder_is_found_and_nothing_else(world: World, tree: SourceTree) -> None:
    found = holders_of(tree, f"{world.package}.core:free")
    assert set(found) == {world.package, *(f"{world.package}.{name}" for name in HOLDS)}
    assert list(found) == sorted(found)


def test_a_star_of_a_star_is_followed_to_its_end(world: World) -> None:
    world.write(f"{world.package}/c.py", "from .core import *")
    world.write(f"{world.package}/b.py", "from .c import *")
    world.write(f"{world.package}/a.py", "from .b import *")
    tree = SourceTree.at(world.package, world.site)
    assert holders_of(tree, f"{world.package}.core:free") == tuple(f"{world.package}.{name}" for name in "abc")


def test_a_star_gives_no_private_names_and_methods_have_no_holders(world: World, tree: SourceTree) -> None:
    world.core("def free", "def _free")
    world.core("def helper", "def helper")
    world.write(f"{world.package}/plain.py", "from .core import _free")
    fresh = SourceTree.at(world.package, world.site)
    assert set(holders_of(fresh, f"{world.package}.core:_free")) == {f"{world.package}.plain"}
    assert holders_of(fresh, f"{world.package}.core:Engine.run") == ()


ALL = {
    "a list": ("__all__ = ['_free']", True),
    "annotated": ("__all__: list[str] = ['_free']", True),
    "added": ("__all__ = ['helper']\n__all__ += ['_free']", True),
    "extended": ("__all__ = ['helper']\n__all__.extend(['_free'])", True),
    "appended": ("__all__ = ['helper']\nif LIMIT:\n    __all__.append('_free')", True),
    "a sum": ("__all__ = ['_free'] + helper()", True),
    "a list with another in it": ("__all__ = ['_free', *helper()]", True),
    "another list": ("__all__ = ['helper']", False),
    "another list, annotated": ("__all__: list[str] = ['helper']", False),
    "another list, and words of it": ("__all__ = ['helper']  # see __all__.append('_free')", False),
    "another list, and a text of it": ("__all__ = ['helper']\nX = '__all__.append'", False),
    "changed": ("__all__ = ['helper']\n__all__[0:] = ['_free']", True),
    "extended over lines": ("__all__ = ['helper']\n__all__ \\\n    .extend(['_free'])", True),
    "extended in brackets": ("__all__ = ['helper']\nif LIMIT > (__all__)[0:].extend(['_free']): ...", True),
    "extended in a function": ("__all__ = ['helper']\ndef more(): __all__.extend(['_free'])", True),
    "a condition": ("if LIMIT:\n    __all__ = ['helper']", False),
}


@pytest.mark.parametrize("name", ALL)
def test_what_all_lists_is_what_a_star_gives(world: World, name: str) -> None:
    text, private = ALL[name]
    world.core("def free", f"{text}\n\n\ndef free")
    world.core("class Engine", "def _free(): ...\n\n\nclass Engine")
    world.write(f"{world.package}/user.py", "from .core import *")
    found = SourceTree.at(world.package, world.site)
    user = (f"{world.package}.user",)
    assert holders_of(found, f"{world.package}.core:_free") == (user if private else ())
    public = any(word in text for word in ("if", "extend(", "sum", "helper()", "[0:]"))
    assert holders_of(found, f"{world.package}.core:free") == (user if public else ())


def test_a_ladder_of_stars_is_climbed_once(world: World) -> None:
    for step in range(30):
        text = f"from .a{step + 1} import *\nfrom .b{step + 1} import *\n"
        world.write(f"{world.package}/a{step}.py", text)
        world.write(f"{world.package}/b{step}.py", text)
    start = time.process_time()
    assert holders_of(SourceTree.at(world.package, world.site), f"{world.package}.a0:free") == ()
    world.write(f"{world.package}/a30.py", "def free(): ...\n")
    assert len(holders_of(SourceTree.at(world.package, world.site), f"{world.package}.a30:free")) == 60
    assert time.process_time() - start < 5


def test_only_files_that_have_the_name_are_parsed(world: World) -> None:
    world.write(f"{world.package}/user.py", "from .core import free")
    for number in range(20):
        world.write(f"{world.package}/other_{number}.py", "freedom = 1")
    tree = SourceTree.at(world.package, world.site)
    assert holders_of(tree, f"{world.package}.core:free") == (f"{world.package}.user",)
    assert set(tree._files) == {f"{world.package}.user"}


def test_pin_writes_the_census_and_a_new_holder_is_drift(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.write(f"{world.package}/user.py", "from .core import free\n")
    world.write(f"{world.package}/lone.py", "from .core import free\n")
    world.declare(world.entry(holders=["PKG.user"], when="always"), world.entry("PKG.core:Engine.run"))
    assert world.pin() == 0
    lock = Lock.read(lock_path(world.manifest, "1.0"))
    assert lock.holders == {f"{world.package}.core:free": (f"{world.package}.lone", f"{world.package}.user")}
    assert f"{world.package}/lone.py" in lock.files
    assert world.verify() == 0

    world.write(f"{world.package}/lone.py", "")
    assert world.verify() == 0, "one that isn't the manifest's may let go"

    world.write(f"{world.package}/fresh.py", "\nfrom .user import free as f\n")
    capsys.readouterr()
    assert world.verify("--format", "json") == 4
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    (finding,) = report["entries"][0]["findings"]
    assert finding["symbol"] == f"{world.package}.fresh" and finding["file"] == f"{world.package}/fresh.py"
    assert finding["verdict"] == "drifted" and "holders" in finding["todo"]
    assert report["entries"][1]["verdict"] == "ok"


BODY = """
def free(x, scale=2):
    '''Another text.'''
    return helper(x) * scale
"""
LONG = """
def NAME(first_number, second_number):
    total_of_both = combine_numbers(first_number, second_number)
    return total_of_both.as_integer()
"""


def gone(world: World, target: str, files: dict[str, str], **pinned: str) -> list[tuple[str, Likeness]]:
    """Pins a target, replaces the package's files, and looks for the target."""
    for name, source in pinned.items():
        world.write(f"{world.package}/{name}.py", source)
    world.declare(world.entry(target, kind="official", id="a"))
    assert world.pin() == 0
    for name, source in files.items():
        world.write(f"{world.package}/{name}.py", source)
    lock = Lock.read(lock_path(world.manifest, "1.0"))
    tree = SourceTree.at(world.package, world.site)
    found = find_moved(tree, lock.symbols[world.text(target)])
    return [(candidate.symbol.removeprefix(f"{world.package}."), candidate.likeness) for candidate in found]


def test_the_same_body_elsewhere_is_where_it_went(world: World) -> None:
    files = {
        "old": "",
        "new": LONG.replace("NAME", "compute"),
        "near": LONG.replace("NAME", "compute") + "\n    x = 1\n",
    }
    assert gone(world, "PKG.old:compute", files, old=LONG.replace("NAME", "compute"))[0] == (
        "new:compute",
        Likeness.SAME,
    )


def test_a_renamed_one_is_found_by_its_body_even_in_a_class(world: World) -> None:
    inside = "class C:\n" + LONG.replace("NAME", "other").replace("\n", "\n    ")
    found = gone(world, "PKG.old:compute", {"old": "", "new": inside}, old=LONG.replace("NAME", "compute"))
    assert found == [("new:C.other", Likeness.BODY)]


def test_a_changed_one_is_found_by_its_name_only_and_as_such(world: World) -> None:
    files = {"old": "", "new": "def compute(a):\n    return 1\n"}
    assert gone(world, "PKG.old:compute", files, old=LONG.replace("NAME", "compute")) == [
        ("new:compute", Likeness.NAME)
    ]


def test_a_body_of_few_words_is_no_evidence_for_another_name(world: World) -> None:
    files = {"old": "", "new": "def first(self):\n    return self.size\n\ndef second(self):\n    return self.size\n"}
    assert gone(world, "PKG.old:size_of", files, old="def size_of(self):\n    return self.size\n") == []


def test_a_moved_class_is_found_and_a_function_of_its_name_is_not_it(world: World) -> None:
    body = LONG.replace("NAME", "method").replace("\n", "\n    ")
    files = {"old": "", "new": "class Engine2:" + body, "trap": "def Engine1():" + body}
    assert gone(world, "PKG.old:Engine1", files, old="class Engine1:" + body) == [("new:Engine2", Likeness.BODY)]


def test_verify_proposes_where_a_vanished_target_went(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.write(f"{world.package}/old.py", LONG.replace("NAME", "compute"))
    world.declare(world.entry("PKG.old:compute", kind="official"))
    assert world.pin() == 0
    (world.site / world.package / "old.py").unlink()
    world.write(f"{world.package}/deep/__init__.py", "")
    world.write(f"{world.package}/deep/new.py", "\n" + LONG.replace("NAME", "compute_it"))
    capsys.readouterr()
    assert world.verify() == 3
    assert f"{world.package}.deep.new:compute_it ({world.package}/deep/new.py:3, same body)" in capsys.readouterr().out
