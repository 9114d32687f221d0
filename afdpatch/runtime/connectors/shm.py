"""The `shm` connector: hops between the processes of one host and one user, on the CPU.

Headers are messages of a unix SOCK_SEQPACKET socket in the abstract namespace; the payload lies in a sealed memfd that
the attention side makes and passes over that socket. Nothing is on the file system, and the kernel gives all back
when a process dies.
"""

from __future__ import annotations

from afdpatch.runtime.connectors._memory import address_of
from afdpatch.runtime.connectors.shm_attention import ShmAttentionConnector
from afdpatch.runtime.connectors.shm_ffn import ShmFfnConnector

__all__ = ["ShmAttentionConnector", "ShmFfnConnector", "address_of"]
