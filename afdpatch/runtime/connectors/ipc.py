"""The `ipc` connector: hops between GPUs of one host, written by one GPU into the other's memory (`afdpatch.kernels`).

The hosts meet at the same address as `shm`'s and speak once a step; see docs/gpu-hop.md.
"""

from __future__ import annotations

from collections.abc import Callable

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors._memory import address_of
from afdpatch.runtime.connectors.ipc_attention import IpcAttentionConnector
from afdpatch.runtime.connectors.ipc_ffn import Compute, IpcFfnConnector
from afdpatch.runtime.status import StatusPage

__all__ = ["IpcAttentionConnector", "IpcFfnConnector", "attention_connector", "ffn_connector"]


def attention_connector(config: AfdConfig, rank: int, page: StatusPage | None = None) -> IpcAttentionConnector:
    """The connector of attention rank ``rank`` to the FFN rank that serves it; not connected yet."""
    return IpcAttentionConnector(
        address_of(config.host, config.port, config.ffn_rank_of(rank)),
        connect_timeout_s=config.connect_timeout_s,
        hop_timeout_s=config.hop_timeout_s,
        page=page,
    )


def ffn_connector(
    config: AfdConfig,
    rank: int,
    compute: Compute,
    freeze: Callable[[bool], None] | None = None,
    page: StatusPage | None = None,
) -> IpcFfnConnector:
    """The connector of FFN rank ``rank``; not listening yet. ``compute`` and ``freeze``: see `IpcFfnConnector`."""
    return IpcFfnConnector(
        address_of(config.host, config.port, rank),
        compute,
        freeze=freeze,
        hop_timeout_s=config.hop_timeout_s,
        page=page,
    )
