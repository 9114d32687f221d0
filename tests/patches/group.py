"""One rank of a tensor-parallel group: `python -m tests.patches.group RANK STORE`; what it saw goes to stdout as JSON.

The group is vLLM's own, over gloo; hops and FFNs are arithmetic.
"""

import json
import os
import sys
import threading
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from afdpatch.patches.parallel import FfnGroup, shared_hop
from afdpatch.runtime.connectors.base import ConnectorError, NoFfnServer

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = GroupCoordinator([[0, 1]], rank, "gloo", use_device_communicator=False, group_name="tp")
said: dict[str, Any] = {}

# ---- attention: one rank hops for both ------------------------------------------------------------------------------

hidden = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)


def fail() -> torch.Tensor:
    """A hop that finds nobody."""
    raise NoFfnServer("nobody")


good = shared_hop(group, (lambda: hidden * 2) if rank == 0 else None, hidden)
said["hop"] = good.tolist() == (hidden * 2).tolist()
try:
    shared_hop(group, fail if rank == 0 else None, hidden)
except ConnectorError as error:
    said["failed hop"] = type(error).__name__
said["hop after it"] = (
    shared_hop(group, (lambda: hidden + 1) if rank == 0 else None, hidden).tolist() == (hidden + 1).tolist()
)

# ---- FFN: both ranks compute ----------------------------------------------------------------------------------------

beats: list[int] = []
computed: list[tuple[int, int]] = []
died = threading.Event()


def compute(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
    """This rank's share, added up over the group."""
    computed.append((layer, hidden_states.shape[0]))
    if layer == 9 and rank == 1:
        os._exit(7)
    part = hidden_states * (layer + rank)
    torch.distributed.all_reduce(part, group=group.device_group)
    return part


def together() -> FfnGroup:
    """A group that has begun."""
    made = FfnGroup(group, compute, 3, torch.bfloat16, lambda: beats.append(1), lambda error: died.set())
    made.start()
    return made


ffn = together()
if rank == 0:
    said["ffn"] = ffn.compute(2, hidden).tolist() == (hidden * 5).tolist()
    ffn.idle()
    said["ffn"] &= ffn.compute(3, hidden[:1]).tolist() == (hidden[:1] * 7).tolist()
ffn.stop(30)
said["computed"], said["beats"], said["died"] = computed[:], len(beats), died.is_set()

if rank == 1:
    print(json.dumps(said), flush=True)  # before anything can end it
ffn = together()
if rank == 0:
    try:
        ffn.compute(9, hidden)
    except RuntimeError:
        said["lost"] = died.is_set()
    print(json.dumps(said))
else:
    died.wait(60)
