"""The `shm` connector: hops between the processes of one host and one user, on the CPU.

Headers are messages of a unix SOCK_SEQPACKET socket in the abstract namespace; the payload lies in a sealed memfd that
the attention side makes and passes over that socket. Nothing is on the file system, and the kernel gives all back
when a process dies.
"""

from __future__ import annotations

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors._memory import address_of
from afdpatch.runtime.connectors.shm_attention import ShmAttentionConnector
from afdpatch.runtime.connectors.shm_ffn import ShmFfnConnector
from afdpatch.runtime.status import StatusPage

__all__ = ["ShmAttentionConnector", "ShmFfnConnector", "address_of", "attention_connector", "ffn_connector"]


def attention_connector(config: AfdConfig, rank: int, page: StatusPage | None = None) -> ShmAttentionConnector:
    """The connector of attention rank ``rank`` to the FFN rank that serves it; not connected yet."""
    return ShmAttentionConnector(
        address_of(config.host, config.port, config.ffn_ranks_of(rank)[0]),
        connect_timeout_s=config.connect_timeout_s,
        hop_timeout_s=config.hop_timeout_s,
        spin_us=config.spin_us,
        page=page,
    )


def ffn_connector(config: AfdConfig, rank: int, page: StatusPage | None = None) -> ShmFfnConnector:
    """The connector of FFN rank ``rank``; not listening yet."""
    return ShmFfnConnector(address_of(config.host, config.port, rank), spin_us=config.spin_us, page=page)
