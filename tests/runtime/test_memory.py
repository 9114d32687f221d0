"""The shared memory of one connection."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from afdpatch.runtime.connectors._memory import HopMemory
from afdpatch.runtime.protocol import Layout

LAYOUT = Layout(max_rows=8, hidden=64, micro_batches=2, dtype="float32")
OUTLIVE = """
from afdpatch.runtime.connectors._memory import HopMemory
from tests.runtime.test_memory import LAYOUT
memory, fd = HopMemory.create(LAYOUT)
view = memory.views[1][0][:4]
memory.close()
view.fill_(3.0)
print(view.sum().item())
"""


def mappings() -> int:
    """How many hop memories this process has mapped."""
    return Path("/proc/self/maps").read_text().count("afdpatch-hop")


def test_a_view_outlives_its_memorys_end() -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    assert done.stdout == f"{3.0 * 4 * 64}\n"


def test_the_mapping_goes_with_the_last_view() -> None:
    gc.collect()  # what earlier tests left
    before = mappings()
    memory, fd = HopMemory.create(LAYOUT)
    os.close(fd)
    view = memory.views[0][0][:1]
    memory.close()
    assert mappings() == before + 1
    assert torch.equal(view, torch.zeros(1, 64))
    del view
    assert mappings() == before
