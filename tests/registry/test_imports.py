"""What importing the registry and running its commands costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.registry.conftest import World

HEAVY = ("yaml", "rich", "torch", "vllm")


def loaded_by(program: str, world: World | None = None) -> list[str]:
    code = f"{program}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    env = os.environ | ({"PYTHONPATH": str(world.site)} if world else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


def test_importing_the_registry_imports_nothing_heavy() -> None:
    modules = loaded_by("import afdpatch.registry")
    assert not set(HEAVY) & set(modules)


def test_arming_and_applying_read_no_yaml(world: World) -> None:
    world.patchset(world.entry(), world.entry("PKG.core:Engine.run", when="always"))
    program = f"""
from afdpatch.registry import PatchSet
patches = PatchSet.load({world.ours!r})
patches.arm()
patches.apply(role="red", process="worker")
import {world.package}.core as core
assert core.free(1) == ("ours", 8)
"""
    assert not set(HEAVY) & set(loaded_by(program, world))


def test_a_spawned_child_gets_a_replacement_by_its_own_name(world: World, tmp_path: Path) -> None:
    init = "from afdpatch.registry import PatchSet\npatches = PatchSet.load('OURS')\npatches.arm()\n"
    world.write(f"{world.ours}/__init__.py", init)
    source = """
    def target(x, scale=2):
        import OURS
        import PKG.core
        PKG.core.result = OURS.patches.original("core.free")(x, scale)
        print("child", PKG.core.result, OURS.patches.states()["core.free"].value)
    """
    world.write(f"{world.ours}/spawned.py", source)
    world.patchset(world.entry(kind="replace", replacement="OURS.spawned:target", when="always"))
    program = world.write(
        "main.py",
        """
        import multiprocessing
        if __name__ == "__main__":
            import OURS
            import PKG.core
            child = multiprocessing.get_context("spawn").Process(target=PKG.core.free, args=(1,))
            child.start()
            child.join(60)
            raise SystemExit(child.exitcode)
        """,
    )
    env = os.environ | {"PYTHONPATH": str(world.site)}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "child 8 applied"
