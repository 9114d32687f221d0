"""What a call of a patched function enters: no frame of a replaced one, one of a wrapped one. Times: tests/bench."""

from __future__ import annotations

import gc
import sys
from typing import Any

from tests.registry.conftest import World


def frames(function: Any) -> int:
    """How many Python frames a call enters."""
    entered = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    gc.disable()  # hypothesis has a function called at each collection
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered - 1  # the lambda's own


def test_a_replaced_function_costs_no_frame_and_a_wrapped_one_one(world: World) -> None:
    core = world.load("PKG.core")
    plain = frames(lambda: core.free(1)), frames(lambda: core.Engine().run(1)), frames(lambda: core.Engine.make(1))
    patches = world.patchset(world.entry(), world.entry("PKG.core:Engine.run"), world.entry("PKG.core:Engine.make"))
    with patches.applied(role="red", process="worker"):
        assert frames(lambda: core.free(1)) == plain[0] + 1
        assert frames(lambda: core.Engine.make(1)) == plain[2] + 1
        assert frames(lambda: core.Engine().run(1)) == plain[1] + 2  # run and make
    patches = world.patchset(world.entry(kind="replace", replacement="OURS.patches:replaced_free"))
    with patches.applied(role="red", process="worker"):
        assert core.free is world.load("OURS.patches").replaced_free
        assert frames(lambda: core.free(1)) == 1
