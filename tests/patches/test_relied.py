"""Whatever `patches` imports from vLLM is in the manifest, so that `verify` sees it change."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import afdpatch
from afdpatch import patches

pytestmark = pytest.mark.e2e
FOLDER = Path(next(iter(patches.__path__)))
NO_SERVER = {"bench_engine.py"}
"""Runs vLLM's public `LLM` for a measurement."""


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each `from vllm... import name` that is run; a module alone has the name ""."""
    tree = ast.parse(source)
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def symbols(module: str, name: str) -> set[str]:
    """Under what a manifest may name it: where it is imported from, and where it is made."""
    owner = importlib.import_module(module)
    value = getattr(owner, name)
    if inspect.ismodule(value):
        return {f"{value.__name__}:__getattr__"}
    if name not in vars(owner):
        return {f"{module}:__getattr__"}
    return {f"{module}:{name}", f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"}


def missing(sources: dict[str, str], named: set[str]) -> list[str]:
    """What those sources import from vLLM, and none of the names stands for, nor one below it."""
    found = []
    for file, source in sources.items():
        for module, name in imports(source):
            if module.split(".")[0] != "vllm" or file in NO_SERVER or not name:
                continue
            wanted = symbols(module, name)
            if not any(each == one or each.startswith(f"{one}.") for each in named for one in wanted):
                found.append(f"{file}: {module}.{name}")
    return found


def test_whatever_the_patches_import_from_vllm_is_in_the_manifest() -> None:
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    entries = afdpatch.patchset.manifest.entries
    named = {symbol for entry in entries for symbol in (entry.target, *entry.relies)}
    assert len(sources) > 15 and missing(sources, named) == []
    assert missing({"new.py": "def f():\n    from vllm.v1.outputs import ModelRunnerOutput, LogprobsLists"}, named) == [
        "new.py: vllm.v1.outputs.LogprobsLists"
    ]
    assert missing({"new.py": "from vllm import envs"}, named - {"vllm.envs:__getattr__"}) == ["new.py: vllm.envs"]
