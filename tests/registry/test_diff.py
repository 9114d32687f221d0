"""Three-way drift: pinned, new, ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from afdpatch.cli import diff as diff_command
from afdpatch.cli.pin import schema_path
from tests.registry.conftest import World, command

OURS = """
from functools import wraps


def shared(value):
    return value.length_of_all


def unused(value):
    return value.never_looked_at


def run(original):
    @wraps(original)
    def run(self, x, *, twice=False):
        self.counter += shared(x)
        return original(self, x, twice=twice)
    return run
"""


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.ours}/patches.py", OURS)
    world.core(
        "        return self.make(x) * (2 if twice else 1)",
        "        self.counter = 0\n        limit = x.length_of_all\n        return self.make(x)",
    )
    world.declare(
        world.entry("PKG.core:Engine.run", relies=["PKG.core:helper", "PKG.core:LIMIT"]),
        world.entry("PKG.core:free", kind="official"),
    )
    assert world.pin() == 0
    shutil.copytree(world.site / world.package, world.site.parent / "base" / world.package)
    return world


def diff(world: World, *arguments: str) -> int:
    return command(diff_command, "diff", "--manifest", str(world.manifest), *arguments)


def outcome(world: World, capsys: pytest.CaptureFixture[str], patch: str = "core.engine-run") -> dict[str, Any]:
    capsys.readouterr()
    base = str(world.site.parent / "base")
    code = diff(world, patch, "--base", base, "--source", str(world.site), "--format", "json")
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == code
    jsonschema.validate(result, json.loads(schema_path("diff").read_text(encoding="utf-8")))
    return result


def touches(result: dict[str, Any]) -> list[str]:
    return [touch["name"] for symbol in result["symbols"] for touch in symbol["touches"]]


def test_nothing_changed_is_nothing_to_do(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("def free", "# moved down\n\n\ndef free")
    result = outcome(pinned, capsys)
    assert (result["exit_code"], result["standing"], result["touches_ours"]) == (0, "same", False)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("self.counter = 0", "self.count = 0", ["counter"]),
        ("limit = x.length_of_all", "limit = x.size", ["length_of_all", "x"]),
        ("return self.make(x)", "return self.make(x + 1)", ["x"]),
        ("return self.make(x)", "never_looked_at = 1\n        return self.make(x)", []),
        ("twice: bool = False", "twice: bool = True", ["twice", "x", "run"]),
    ],
)
def test_a_change_touches_the_names_that_ours_uses_too(
    pinned: World, capsys: pytest.CaptureFixture[str], old: str, new: str, names: list[str]
) -> None:
    pinned.core(old, new)
    result = outcome(pinned, capsys)
    assert result["exit_code"] == 4
    assert set(touches(result)) == set(names)
    assert result["touches_ours"] == bool(names)
    assert f"+        {new}".splitlines()[0][-10:] in "\n".join(result["symbols"][0]["diff"])


def test_what_ours_does_with_a_name_is_told_with_its_line(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("self.counter = 0", "self.count = 0")
    (touch,) = outcome(pinned, capsys)["symbols"][0]["touches"]
    line = OURS.splitlines().index("        self.counter += shared(x)") + 1
    assert touch == {"name": "counter", "upstream": ["attribute"], "ours": ["attribute"], "line": line}


def test_other_parameters_are_told_apart(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("twice: bool = False", "twice: bool = False, thrice: bool = False")
    result = outcome(pinned, capsys)
    assert result["standing"] == "interface"
    old, new = result["symbols"][0]["parameters"]
    assert "thrice" in new and "thrice" not in old and result["touches_ours"]


def test_a_relied_on_symbol_s_change_is_shown_beside_the_target(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned.core("return x + LIMIT", "return x - LIMIT")
    pinned.core("LIMIT = 3", "LIMIT = 4")
    result = outcome(pinned, capsys)
    assert [symbol["standing"] for symbol in result["symbols"]] == ["same", "body", "body"]
    assert "-LIMIT = 3" in result["symbols"][2]["diff"] and "+LIMIT = 4" in result["symbols"][2]["diff"]


def test_a_moved_target_is_compared_where_it_is_now(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    source = (pinned.site / pinned.package / "core.py").read_text()
    pinned.write(f"{pinned.package}/new.py", source.replace("return self.make(x)", "return self.make(x) + 0"))
    pinned.write(f"{pinned.package}/core.py", "from .new import *\nfrom .new import Engine, LIMIT, helper")
    result = outcome(pinned, capsys)
    target = result["symbols"][0]
    assert (result["exit_code"], target["standing"]) == (3, "moved")
    assert target["new"].startswith(f"{pinned.package}/new.py:")
    assert "+        return self.make(x) + 0" in target["diff"] and result["touches_ours"]


def test_an_entry_without_a_replacement_says_so(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("* scale\n", "* scale + 1\n")
    result = outcome(pinned, capsys, "core.free")
    assert (result["ours"], result["touches_ours"], result["standing"]) == (None, False, "body")


def test_ours_is_shown_with_the_functions_that_it_uses_and_no_machine_s_path(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned.core("self.counter = 0", "self.count = 0")
    result = outcome(pinned, capsys)
    assert "def shared" in result["ours_text"] and "def unused" not in result["ours_text"]
    assert result["ours"] == f"{pinned.ours}/patches.py:{OURS.splitlines().index('def run(original):') + 1}"


@pytest.mark.parametrize("what", ["\x0c", "'\u2028'", "'\x1c'"])
def test_lines_are_counted_as_python_counts_them(world: World, capsys: pytest.CaptureFixture[str], what: str) -> None:
    world.write(f"{world.ours}/patches.py", f"{what}\n" * 6 + OURS)
    world.write(f"{world.package}/core.py", f"{what}\n" * 6 + "def run(x):\n    return x.length\n")
    world.declare(world.entry("PKG.core:run", id="core.engine-run"))
    assert world.pin() == 0
    shutil.copytree(world.site / world.package, world.site.parent / "base" / world.package)
    world.core("x.length", "x.length_of_all")
    result = outcome(world, capsys)
    assert (touches(result), result["touches_ours"]) == (["length_of_all", "x"], True)
    assert "def shared" in result["ours_text"]
    diff = [line for line in result["symbols"][0]["diff"] if line[:1] in "+-"][2:]
    assert diff == ["-    return x.length", "+    return x.length_of_all"]


def test_other_bases_and_decorators_of_its_class_are_shown(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("class Engine:", "class Engine(\n    dict,\n    metaclass=type,\n):")
    result = outcome(pinned, capsys)
    assert (result["exit_code"], result["standing"]) == (4, "interface")
    assert {"-class Engine:", "+class Engine(", "+    dict,"} <= set(result["symbols"][0]["diff"])


def test_a_change_that_is_not_in_these_lines_is_told(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.core("LIMIT = 3", "if __debug__:\n    LIMIT = 3")
    world.declare(world.entry("PKG.core:free", relies=["PKG.core:LIMIT"]))
    assert world.pin() == 0
    base = str(shutil.copytree(world.site / world.package, world.site.parent / "base" / world.package).parent)
    world.core("if __debug__", "if not __debug__")
    assert diff(world, "core.free", "--base", base, "--source", str(world.site)) == 4
    assert "a condition that it stands under" in capsys.readouterr().out


def test_who_overrides_the_target_and_didn_t_is_a_change(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    text = "from .core import Engine\nclass S(Engine):\n    def run(self, x): ...\n"
    pinned.write(f"{pinned.package}/new.py", text)
    result = outcome(pinned, capsys)
    assert (result["exit_code"], result["standing"], result["touches_ours"]) == (4, "interface", False)
    assert [part["symbol"] for part in result["others"]] == [f"{pinned.package}.new"]
    assert {symbol["standing"] for symbol in result["symbols"]} == {"same"}
    base = str(pinned.site.parent / "base")
    for option in ("text", "markdown"):
        assert diff(pinned, "core.engine-run", "--base", base, "--source", str(pinned.site), "--format", option) == 4
        out = capsys.readouterr().out
        assert f"{pinned.package}.new" in out and "Nothing changed" not in out


def test_a_new_holder_is_a_change(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.declare(world.entry(when="always"))
    assert world.pin() == 0
    shutil.copytree(world.site / world.package, world.site.parent / "base" / world.package)
    world.write(f"{world.package}/new.py", "from .core import free\n")
    result = outcome(world, capsys, "core.free")
    assert (result["exit_code"], result["others"]) == (
        4,
        [{"symbol": f"{world.package}.new", "standing": "interface", "detail": "holds the target too"}],
    )


def test_a_base_that_isn_t_the_pinned_one_is_refused(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("self.counter = 0", "self.count = 0")
    capsys.readouterr()
    assert diff(pinned, "core.engine-run", "--source", str(pinned.site)) == 8, "the installed one is no base"
    assert "--base" in capsys.readouterr().err
    assert diff(pinned, "core.none") == 2
    assert "core.engine-run" in capsys.readouterr().err
    assert diff(pinned, "core.engine-run", "--base", str(Path("nowhere"))) == 2


def test_text_and_markdown_show_all_three(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("self.counter = 0", "self.count = 0")
    base = str(pinned.site.parent / "base")
    for option in ("text", "markdown"):
        capsys.readouterr()
        assert diff(pinned, "core.engine-run", "--base", base, "--format", option) == 4
        out = capsys.readouterr().out
        for part in (
            "-        self.counter = 0",
            "+        self.count = 0",
            "def run(original):",
            "counter: attribute",
        ):
            assert part in out, (option, part)
        assert "touches what our replacement relies on" in out and "\x1b" not in out


def test_a_default_that_is_deep_is_compared(world: World) -> None:
    world.declare(world.entry())
    assert world.pin() == 0
    base = world.site.parent / "base"
    shutil.copytree(world.site / world.package, base / world.package)
    world.core("scale=2", f"scale={' + '.join(['2'] * 900)}")
    assert command(diff_command, "diff", "--manifest", str(world.manifest), "core.free", "--base", str(base)) == 4
