"""The `nccl` connector: hops between GPUs of several hosts, through NCCL's send and receive.

The hosts meet over TCP as `tcp`'s do and speak once a step as `ipc`'s; see docs/gpu-hop.md.
"""

from __future__ import annotations

from afdpatch.kernels.nccl import NcclBuffers
from afdpatch.runtime.connectors.ipc_attention import GpuEnd
from afdpatch.runtime.connectors.ipc_ffn import Compute
from afdpatch.runtime.connectors.nccl_attention import NcclAttentionConnector
from afdpatch.runtime.connectors.nccl_ffn import NcclFfnConnector

__all__ = ["Compute", "GpuEnd", "NcclAttentionConnector", "NcclBuffers", "NcclFfnConnector"]
