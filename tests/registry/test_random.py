"""Random manifests, random modules: any sequence of calls ends with the originals or the whole set, never between."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afdpatch.registry import PatchError, PatchSet
from tests.registry.conftest import World

FORMS = {
    "function": "def NAME(x):\n    return x\n",
    "coroutine": "async def NAME(x):\n    return x\n",
    "method": "class C_NAME:\n    def NAME(self, x):\n        return x\n",
    "static": "class C_NAME:\n    @staticmethod\n    def NAME(x):\n        return x\n",
    "class": "class C_NAME:\n    @classmethod\n    def NAME(cls, x):\n        return x\n",
    "property": "class C_NAME:\n    @property\n    def NAME(self):\n        return 1\n",
    "stiff": """class Stiff(type):
    def __setattr__(cls, name, value):
        if STIFF and value.__code__.co_filename != __file__:
            raise RuntimeError("the slot takes nothing else")
        super().__setattr__(name, value)

class C_NAME(metaclass=Stiff):
    def NAME(self, x):
        return x
""",
    "value": "NAME = [1]\n",
}
MAKERS = """
broken = set()
values = [[2] for _ in range(5)]
v0, v1, v2, v3, v4 = values

def check():
    if broken:
        raise RuntimeError("broken")

def function(original):
    check()
    return lambda x: original(x)

def coroutine(original):
    async def ours(x):
        return await original(x)
    check()
    return ours

def method(original):
    check()
    return lambda self, x: original(self, x)

static = function

def klass(original):
    check()
    return lambda cls, x: original(cls, x)

def prop(original):
    check()
    return lambda self: original(self)

def install():
    check()
    log.append(1)
    return log.pop

log = []
"""
MAKER = {"class": "klass", "property": "prop", "stiff": "method"}

patch = st.fixed_dictionaries(
    {
        "module": st.integers(0, 2),
        "form": st.sampled_from([*sorted(FORMS), "stiff"]),
        "when": st.sampled_from(["always", "role"]),
        "held": st.booleans(),
    }
)
operation = st.one_of(
    st.sampled_from(["arm", "apply", "undo", "break", "stiffen", "mend", "over"]),
    st.sampled_from([f"import m{number}" for number in range(3)] + ["import user"]),
)
operations = st.one_of(
    st.lists(operation, max_size=12),
    # The set fails in the middle of its slots.
    st.lists(operation, max_size=4).map(lambda before: [*before, "mend", "import m0", "stiffen", "apply"]),
)


def slot(world: World, number: int, item: dict[str, Any]) -> tuple[Any, str] | None:
    module = sys.modules.get(f"{world.package}.m{item['module']}")
    if module is None:
        return None
    name = f"t{number}"
    return (module, name) if item["form"] in ("function", "coroutine", "value") else (vars(module)[f"C_{name}"], name)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(items=st.lists(patch, min_size=1, max_size=5), operations=operations, install=st.booleans())
def test_any_manifest_and_any_sequence_end_with_the_originals_or_the_whole_set(
    world: World, items: list[dict[str, Any]], operations: list[str], install: bool
) -> None:
    for name in [name for name in sys.modules if name.startswith((f"{world.package}.", f"{world.ours}."))]:
        del sys.modules[name]
    world.write(f"{world.ours}/makers.py", MAKERS)
    sources: dict[int, str] = {0: "", 1: "", 2: ""}
    user, entries = "", []
    for number, item in enumerate(items):
        name = f"t{number}"
        sources[item["module"]] += FORMS[item["form"]].replace("NAME", name)
        top = item["form"] in ("function", "coroutine", "value")
        held = item["held"] and top
        user += f"from .m{item['module']} import {name}\n" if held else ""
        target = f"PKG.m{item['module']}:{name if top else f'C_{name}.{name}'}"
        kind = "replace" if item["form"] == "value" else "wrap"
        maker = f"OURS.makers:{f'v{number}' if kind == 'replace' else MAKER.get(item['form'], item['form'])}"
        entries.append(
            world.entry(
                target, id=name, when=item["when"], kind=kind, replacement=maker, holders=["PKG.user"] if held else []
            )
        )
    if install:
        entries.append(world.entry("PKG.m0:marker", id="inst", kind="install", replacement="OURS.makers:install"))
    world.write(f"{world.package}/state.py", "STIFF = set()\n")
    for number, source in sources.items():
        world.write(f"{world.package}/m{number}.py", f"from .state import STIFF\n{source}\ndef marker(): ...\n")
    world.write(f"{world.package}/user.py", user)
    patches: PatchSet = world.patchset(*entries)
    makers, stiff = world.load("OURS.makers"), world.load("PKG.state").STIFF
    originals: dict[tuple[int, str], Any] = {}

    def look(when: str) -> list[bool]:
        """For each imported target of that kind, whether the original stands there; checks its holder too."""
        seen = []
        for number, item in enumerate(items):
            found = slot(world, number, item)
            if item["when"] != when or found is None:
                continue
            owner, name = found
            raw = vars(owner)[name]
            function = getattr(raw, "__func__", None) or getattr(raw, "fget", None) or raw
            code = getattr(function, "__code__", None)
            original = raw == [1] if code is None else f"{world.package}/m" in code.co_filename
            if original:
                kept = originals.setdefault((id(owner), name), raw)
                assert kept is raw, "the very object is put back"
            holder = sys.modules.get(f"{world.package}.user")
            if item["held"] and holder is not None and hasattr(holder, name):
                assert vars(holder)[name] is raw, "a holder has what its module has"
            seen.append(original)
        return seen

    armed = applied = False
    try:
        for step in operations:
            failed = patches.failure
            with contextlib.suppress(PatchError, RuntimeError):
                if step == "arm":
                    patches.arm()
                elif step == "apply":
                    patches.apply(role="red", process="worker")
                elif step == "undo":
                    patches.undo()
                elif step == "break":
                    makers.broken.add(1)
                elif step == "stiffen":  # a slot fails once others are filled
                    stiff.add(1)
                elif step == "mend":
                    makers.broken.clear()
                    stiff.clear()
                elif step == "over":
                    patches.plan(role="red", process="worker")
                else:
                    world.load(f"PKG.{step.partition(' ')[2]}")
            undone = step == "undo"
            armed = not undone and (armed or step in ("arm", "apply"))
            applied = not undone and (applied or (step == "apply" and patches.failure is None))
            assert undone or failed is None or patches.failure is failed, "a failure is sticky"
            role = look("role")
            assert all(role) if not applied else not any(role), f"half of the role's entries after {step}"
            assert bool(makers.log) == (applied and install)
            always = look("always")
            if not armed:
                assert all(always)
            elif patches.failure is None:
                assert not any(always)
    finally:
        patches.undo()
    assert all(look("always")) and all(look("role")) and not makers.log
