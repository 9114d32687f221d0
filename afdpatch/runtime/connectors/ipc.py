"""The `ipc` connector: hops between GPUs of one host, written by one GPU into the other's memory (`afdpatch.kernels`).

The hosts meet at the same address as `shm`'s and speak once a step; see docs/gpu-hop.md.
"""

from __future__ import annotations

from afdpatch.runtime.connectors._memory import address_of
from afdpatch.runtime.connectors.ipc_attention import GpuEnd, IpcAttentionConnector
from afdpatch.runtime.connectors.ipc_ffn import Compute, IpcFfnConnector

__all__ = ["Compute", "GpuEnd", "IpcAttentionConnector", "IpcFfnConnector", "address_of"]
