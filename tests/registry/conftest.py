"""A small package to patch, a package of ours that patches it, and a manifest, all made in a temporary directory."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from afdpatch.cli import pin as pin_command
from afdpatch.cli import verify as verify_command
from afdpatch.registry import PatchSet
from tests.registry.zoo import OURS as ZOO_OURS
from tests.registry.zoo import ZOO

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NUMBERS = itertools.count()

CORE = '''
"""The module that is patched."""

LIMIT = 3


def helper(x):
    """Helps."""
    return x + LIMIT


def free(x, scale=2):
    """A function of the module."""
    # a comment
    return helper(x) * scale


class Engine:
    """A class."""

    def run(self, x: int, *, twice: bool = False) -> int:
        """A method."""
        return self.make(x) * (2 if twice else 1)

    @staticmethod
    def make(x):
        return x + 10

    @classmethod
    def name(cls, suffix=""):
        return cls.__name__ + suffix
'''

OURS = """
from functools import wraps

ready = True


def free(original):
    @wraps(original)
    def free(x, scale=2):
        return ("ours", original(x, scale))
    return free


def run(original):
    def run(self, x, *, twice=False):
        return ("ours", original(self, x, twice=twice))
    return run


def make(original):
    def make(x):
        return ("ours", original(x))
    return make


def name(original):
    def name(cls, suffix=""):
        return ("ours", original(cls, suffix))
    return name


def replaced_free(x, scale=2):
    return ("replaced", x, scale)


def failing(original):
    raise ZeroDivisionError("by design")


log = []


def install():
    log.append("installed")
    return lambda: log.append("removed")
"""


class World:
    """Writes modules, manifests and locks, and runs the commands on them."""

    def __init__(self, folder: Path) -> None:
        number = next(NUMBERS)
        self.package = f"target_{number}"
        self.ours = f"ours_{number}"
        self.site = folder / "site"
        self.distribution("1.0")
        self.write(f"{self.package}/__init__.py", "")
        self.write(f"{self.package}/_version.py", "__version__ = version = '1.0'\n__commit_id__ = commit_id = None\n")
        self.write(f"{self.package}/core.py", CORE)
        self.write(f"{self.ours}/__init__.py", "")
        self.write(f"{self.ours}/patches.py", OURS)
        self.manifest = self.site / self.ours / "afd.yaml"

    def text(self, text: str) -> str:
        return text.replace("PKG", self.package).replace("OURS", self.ours)

    def write(self, file: str, source: str) -> Path:
        path = self.site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(textwrap.dedent(source)), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def core(self, old: str, new: str) -> None:
        """Edits the patched module's source; the old text must be there."""
        path = self.site / self.package / "core.py"
        source = path.read_text(encoding="utf-8")
        assert source.count(old) >= 1
        path.write_text(source.replace(old, new, 1), encoding="utf-8")

    def distribution(self, version: str) -> None:
        folder = self.site / f"{self.package}-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {version}\n")
        importlib.invalidate_caches()

    def entry(self, target: str = "PKG.core:free", **keys: Any) -> dict[str, Any]:
        """An entry; what isn't given is made up from the target."""
        name = target.rpartition(":")[2]
        base: dict[str, Any] = {
            "id": f"core.{name.lower().replace('.', '-')}",
            "seam": "core",
            "target": target,
            "kind": "wrap",
            "replacement": f"OURS.patches:{name.rpartition('.')[2]}",
            "when": "role",
            "why": "A test.",
        }
        base |= keys
        if base["when"] == "role":
            base |= {"roles": base.get("roles", ["red"]), "processes": base.get("processes", ["worker"])}
        if base["kind"] == "official":
            base.pop("replacement")
        return base

    def data(self, *entries: dict[str, Any], **header: Any) -> dict[str, Any]:
        data = {
            "manifest": "afd",
            "package": "PKG",
            "distributions": ["PKG", "PKG-other"],
            "version": "1.0",
            "commit": COMMIT,
            "patches": list(entries),
        }
        result: dict[str, Any] = json.loads(self.text(json.dumps(data | header)))
        return result

    def declare(self, *entries: dict[str, Any], **header: Any) -> None:
        """Writes the manifest."""
        self.manifest.write_text(yaml.safe_dump(self.data(*entries, **header), sort_keys=False), encoding="utf-8")

    def pin(self, *options: str) -> int:
        return command(pin_command, "pin", "--manifest", str(self.manifest), *options)

    def verify(self, *options: str) -> int:
        return command(verify_command, "verify", "--manifest", str(self.manifest), *options)

    def patchset(self, *entries: dict[str, Any], **header: Any) -> PatchSet:
        """Declares and pins entries, and loads them."""
        if entries:
            self.declare(*entries, **header)
            assert self.pin() == 0
        return PatchSet.load(self.ours, "afd")

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(self.text(module))


def always(world: World, target: str = "PKG.core:free", **keys: Any) -> dict[str, Any]:
    """An entry that is in effect from `arm` on."""
    return world.entry(target, when="always", **keys)


def command(module: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    result: int = module.run(parser.parse_args(arguments))
    return result


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    monkeypatch.syspath_prepend(str(made.site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finders = list(sys.meta_path)
    # A search for holders looks through everything that the collector knows. Nothing that is older than the world can
    # hold something of it; torch and the syntax trees of other tests' packages only make the search long.
    gc.freeze()
    yield made
    gc.unfreeze()
    # wrapt's finder stays: it is put there once and for all. What refuses modules goes.
    sys.meta_path[:] = [item for item in sys.meta_path if item in finders or type(item).__module__.startswith("wrapt")]
    for name in list(sys.modules):
        if name.partition(".")[0] in (made.package, made.ours):
            del sys.modules[name]


Make = Callable[..., PatchSet]


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    """Makes a set of a manifest of its own, from entries."""

    def made(name: str, *entries: dict[str, Any], **header: Any) -> PatchSet:
        path = Path(world.site, world.ours, f"{name}.yaml")
        path.write_text(yaml.safe_dump(world.data(*entries, manifest=name, **header)), encoding="utf-8")
        folder = world.site / f"{world.ours}_{name}"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / f"{name}.yaml").write_text(path.read_text())
        assert command(pin_command, "pin", "--manifest", str(folder / f"{name}.yaml")) == 0
        sets.append(PatchSet.load(f"{world.ours}_{name}", name))
        return sets[-1]

    sets: list[PatchSet] = []
    yield made
    for patches in reversed(sets):
        patches.undo()


@pytest.fixture
def zoo(world: World) -> World:
    world.write(f"{world.package}/zoo.py", ZOO)
    world.write(f"{world.ours}/kinds.py", ZOO_OURS)
    world.write(
        f"{world.ours}/classes.py",
        "from PKG.zoo import Alone\nclass Alone(Alone):\n    def hello(self): return 'ours'\nclass Other: ...\n",
    )
    return world
