"""`verify`, `list`, `explain` and `map` as commands: what they print, their exit codes, what they cost."""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from afdpatch.cli import COMMANDS, main
from afdpatch.registry import Manifest, SourceTree, Verdict, packaged_manifest
from afdpatch.registry.manifest import KINDS, PATHS, WHENS
from tests.registry.conftest import COMMIT, World, world
from tests.registry.test_reports import closed

__all__ = ["world"]

FORGE = "https://forge.example/owner/project"
OWN = packaged_manifest("afdpatch.manifests", "afd")


@pytest.fixture
def pinned(world: World) -> World:
    world.write(f"{world.package}/user.py", "from .other import free as another\nfrom .core import free\n")
    world.write(f"{world.ours}/probes.py", 'def gone():\n    """Is it gone?"""\n    return False\n')
    world.declare(
        world.entry(
            relies=["PKG.core:helper", "PKG.core:LIMIT"],
            holders=["PKG.user"],
            remove_when="OURS.probes:gone",
            since="0.1",
        ),
        world.entry("PKG.core:Engine.run", roles=["blue"], processes=["api"]),
        world.entry("PKG.core:Engine", id="core.engine", kind="official", when="always"),
        repository=FORGE,
    )
    assert world.pin() == 0
    return world


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def asked(pinned: World, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints as JSON, after a look whether it fits its schema and has no key beside it."""
    code, out, err = printed(capsys, *words, "--manifest", str(pinned.manifest), "--format", "json")
    assert code == 0, err
    schema = json.loads((OWN.parent / "schemas" / f"{words[0]}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(closed(schema)).validate(json.loads(out))
    return json.loads(out)


# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_has_every_entry_in_order(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    listed = asked(pinned, capsys, "list")
    assert [entry["id"] for entry in listed["entries"]] == ["core.free", "core.engine-run", "core.engine"]
    assert listed["entries"][1] == {
        "id": "core.engine-run",
        "seam": "core",
        "target": f"{pinned.package}.core:Engine.run",
        "kind": "wrap",
        "when": "role",
        "roles": ["blue"],
        "processes": ["api"],
        "path": "cold",
    }
    code, text, _ = printed(capsys, "list", "--manifest", str(pinned.manifest))
    assert code == 0 and text.endswith(f"3 of 3 entries of afd, for {pinned.package} 1.0\n")
    assert re.search(r"core\.engine-run +core +\S+:Engine\.run +wrap +role +blue +api +cold", text)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--role", "blue"], ["core.engine-run", "core.engine"]),
        (["--process", "worker"], ["core.free", "core.engine"]),
        (["--role", "red", "--process", "api"], ["core.engine"]),
        (["--seam", "none"], []),
    ],
)
def test_list_shows_what_a_process_uses(
    pinned: World, capsys: pytest.CaptureFixture[str], options: list[str], ids: list[str]
) -> None:
    assert [entry["id"] for entry in asked(pinned, capsys, "list", *options)["entries"]] == ids


def test_list_needs_no_package_and_no_lock(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.declare(world.entry())
    (world.site / world.package / "__init__.py").unlink()
    assert len(asked(world, capsys, "list")["entries"]) == 1


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_says_why_where_since_and_until_when(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(pinned, capsys, "explain", "core.free")
    core = f"{pinned.package}/core.py"
    lines = (pinned.site / core).read_text().splitlines()
    ours = (pinned.site / pinned.ours / "patches.py").read_text().splitlines()
    assert (found["why"], found["since"], found["verdict"]) == ("A test.", "0.1", "ok")
    assert (found["roles"], found["processes"]) == (["red"], ["worker"])
    assert found["target"]["file"] == core
    assert lines[found["target"]["line"] - 1].startswith("def free(")
    assert found["target"]["link"] == f"{FORGE}/blob/{COMMIT}/{core}#L{found['target']['line']}"
    assert [item["name"].partition(":")[2] for item in found["relies"]] == ["helper", "LIMIT"]
    assert [lines[item["line"] - 1].split("(")[0] for item in found["relies"]] == ["def helper", "LIMIT = 3"]
    (holder,) = found["holders"]
    assert (holder["file"], holder["line"]) == (f"{pinned.package}/user.py", 2)
    assert Path(found["replacement"]["path"]).name == "patches.py"
    assert ours[found["replacement"]["line"] - 1] == "def free(original):"
    assert found["remove_when"]["doc"] == "Is it gone?"
    declared = int(found["declared"].rpartition(":")[2])
    assert "id: core.free" in pinned.manifest.read_text().splitlines()[declared - 1]


def test_explain_has_a_verdict_for_each_thing_relied_on(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    pinned.core("LIMIT = 3", "LIMIT = 4")
    pinned.core("def helper", "def other")
    (pinned.site / pinned.package / "user.py").unlink()
    found = asked(pinned, capsys, "explain", "core.free")
    assert {item["name"].partition(":")[2]: item["verdict"] for item in found["relies"]} == {
        "helper": "absent",
        "LIMIT": "drifted",
    }
    assert found["relies"][0]["file"] is None
    assert [item["verdict"] for item in found["holders"]] == ["absent"]
    assert (found["verdict"], found["target"]["verdict"]) == ("absent", "ok")
    code, text, _ = printed(capsys, "explain", "core.free", "--manifest", str(pinned.manifest))
    assert code == 0, "explaining isn't verifying"
    assert re.search(r"relies on +\S+:LIMIT  drifted\n", text) and re.search(r"relies on +\S+:helper  absent\n", text)


def test_explain_in_words_has_all_of_it(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, "explain", "core.free", "--manifest", str(pinned.manifest))
    assert code == 0
    for part in (
        "A test.",
        "wrap, cold path",
        "since       0.1",
        "roles       red",
        "processes   worker",
        f"{pinned.package}/user.py:2",
        f"{FORGE}/blob/{COMMIT}/{pinned.package}/core.py#L",
        f"{pinned.ours}.patches:free",
        "patches.py:",
        f"{pinned.ours}.probes:gone",
        "Is it gone?",
        "afd.yaml:",
    ):
        assert part in text, part
    assert "\x1b" not in text
    _, text, _ = printed(capsys, "explain", "core.engine", "--manifest", str(pinned.manifest))
    assert "no condition is declared" in text and "replacement" not in text


def test_explain_imports_nothing_of_what_it_explains(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    asked(pinned, capsys, "explain", "core.free")
    assert not {name.partition(".")[0] for name in sys.modules} & {pinned.package, pinned.ours}


def test_a_replacement_that_is_not_there_is_told(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    (pinned.site / pinned.ours / "patches.py").write_text("def other(): ...\n")
    _, text, _ = printed(capsys, "explain", "core.free", "--manifest", str(pinned.manifest))
    assert re.search(r"absent: \S+patches\.py has no free\n", text)
    (pinned.site / pinned.ours / "patches.py").unlink()
    _, text, _ = printed(capsys, "explain", "core.free", "--manifest", str(pinned.manifest))
    assert f"absent: there is no module {pinned.ours}.patches\n" in text


def test_an_unknown_id_is_usage_with_the_nearest_and_an_unpinned_one_is_a_stale_lock(
    pinned: World, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = printed(capsys, "explain", "core.fre", "--manifest", str(pinned.manifest))
    assert (code, out) == (2, "") and "did you mean core.free?" in err
    pinned.declare(pinned.entry(), pinned.entry("PKG.core:helper", id="core.new"))
    code, out, err = printed(capsys, "explain", "core.new", "--manifest", str(pinned.manifest))
    assert (code, out) == (5, "") and "afdpatch pin" in err


# ---- map -------------------------------------------------------------------------------------------------------------

CHAIN = """\
chain: afd
title: A chain
about: Of one box.
processes: {p: {title: P, about: one}}
boxes: [{id: free, title: Free, process: p, symbols: ["PKG.core:free"], does: Is free.}]
"""


def test_map_reads_the_chain_beside_the_manifest_or_the_one_that_is_named(
    pinned: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("map", "--manifest", str(pinned.manifest))
    code, out, err = printed(capsys, *words)
    assert (code, out) == (2, "") and "afd.chain.yaml" in err and "--chain" in err
    other = tmp_path / "other.yaml"
    other.write_text(pinned.text(CHAIN), encoding="utf-8")
    assert printed(capsys, *words, "--chain", str(other))[0] == 0
    pinned.manifest.with_name("afd.chain.yaml").write_text(pinned.text(CHAIN), encoding="utf-8")
    code, text, _ = printed(capsys, *words)
    line = SourceTree.at(pinned.package, pinned.site).resolve(f"{pinned.package}.core:free").line
    assert code == 0 and f"free  {pinned.package}/core.py:{line}\n" in text and "core.free  wrap, role, ok" in text
    assert "In no box of the chain" in text and "\x1b" not in text
    found = asked(pinned, capsys, "map")
    assert [hook["id"] for hook in found["boxes"][0]["patches"]] == ["core.free"]
    assert [hook["id"] for hook in found["elsewhere"]] == ["core.engine-run", "core.engine"]


def test_map_writes_a_page(pinned: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pinned.manifest.with_name("afd.chain.yaml").write_text(pinned.text(CHAIN), encoding="utf-8")
    page = tmp_path / "map.html"
    code, out, err = printed(capsys, "map", "--manifest", str(pinned.manifest), "--html", str(page))
    assert (code, out) == (0, "") and str(page) in err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    missing = tmp_path / "no" / "map.html"
    assert printed(capsys, "map", "--manifest", str(pinned.manifest), "--html", str(missing))[0] == 2


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "list", "explain", "map"])
def test_help_teaches_with_an_example_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command in [item.name for item in COMMANDS]
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  afdpatch {command}" in text
    assert re.search(r"exit codes[^\n]*:\n", text) and re.search(r"^  2  usage", text, re.MULTILINE)


QUICK = [
    ["list"],
    ["explain", "http.middleware"],
    ["map"],
    *(["verify", "--format", form] for form in ("sarif", "junit")),
]


@pytest.mark.parametrize("words", QUICK)
def test_a_command_imports_neither_vllm_nor_torch(words: list[str]) -> None:
    try:
        SourceTree.installed(Manifest.read(OWN).package)
    except FileNotFoundError:
        pytest.skip("no vllm here")
    program = (
        "import sys\nfrom afdpatch.cli import main\ncode = main(sys.argv[1:])\n"
        "print(code, sorted({'vllm', 'torch', 'asyncio'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d \[(?:'asyncio')?\]$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("command", ["verify", "list"])
def test_a_reader_that_has_had_enough_is_no_error_with_a_message(pinned: World, command: str) -> None:
    program = "import sys; from afdpatch.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, command, "--manifest", str(pinned.manifest), "--format", "json"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(pinned.site), os.environ.get("PYTHONPATH", "")])}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_every_schema_names_the_verdicts_and_the_kinds_that_there_are() -> None:
    for command in ("verify", "explain", "map"):
        schema = json.loads((OWN.parent / "schemas" / f"{command}.json").read_text(encoding="utf-8"))
        assert schema["$defs"]["verdict"]["enum"] == [verdict.value for verdict in Verdict]
    listed = json.loads((OWN.parent / "schemas" / "list.json").read_text(encoding="utf-8"))
    kinds = listed["properties"]["entries"]["items"]["properties"]
    assert (kinds["kind"]["enum"], kinds["when"]["enum"], kinds["path"]["enum"]) == (
        list(KINDS),
        list(WHENS),
        list(PATHS),
    )


def test_no_command_s_module_hides_a_built_in() -> None:
    assert not {item.module for item in COMMANDS} & set(dir(builtins))


@pytest.mark.parametrize("command", ["verify", "list", "explain", "map", "diff", "compat", "bisect"])
def test_every_command_that_prints_json_publishes_its_schema(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:  # no id and no source are asked for
        main([command, "--schema"])
    assert ended.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"].startswith(f"afdpatch {command} ")


def test_diff_and_compat_print_what_their_schemas_say(pinned: World, capsys: pytest.CaptureFixture[str]) -> None:
    """`bisect` is in tests/registry/test_bisect.py."""
    base = pinned.site.parent / "base"
    shutil.copytree(pinned.site / pinned.package, base / pinned.package)
    pinned.core("scale=2)", "scale=3)")
    new = ["--manifest", str(pinned.manifest), "--format", "json"]
    for words in (["compat", "installed"], ["diff", "core.free", "--base", str(base)]):
        code, out, err = printed(capsys, *words, *new)
        assert code == 4, err
        schema = json.loads((OWN.parent / "schemas" / f"{words[0]}.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(closed(schema)).validate(json.loads(out))


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["verify", "--source", "BASE"], None),
        (["diff", "core.free", "--source", "BASE"], "--base"),
        (["pin"], "--source"),
    ],
)
def test_where_the_package_is_not_installed_the_missing_source_is_named(
    pinned: World, capsys: pytest.CaptureFixture[str], words: list[str], option: str | None
) -> None:
    base = pinned.site.parent / "base"
    (base / pinned.package).parent.mkdir()
    (pinned.site / pinned.package).rename(base / pinned.package)
    words = [str(base) if word == "BASE" else word for word in words]
    code, _, err = printed(capsys, *words, "--manifest", str(pinned.manifest))
    if option is None:
        assert code == 0, err
    else:
        assert code == 2
        assert "is not installed as a package of Python source; name a source with " + option in err


def test_the_packaged_files_are_there() -> None:
    folder = OWN.parent
    for name in ("afd.chain.yaml", *(f"schemas/{command}.json" for command in ("verify", "diff", "compat", "bisect"))):
        assert (folder / name).is_file()
