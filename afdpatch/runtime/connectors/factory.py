"""The connectors of a configuration, by its transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import AttentionConnector, FfnConnector
from afdpatch.runtime.connectors.shm import ShmAttentionConnector, ShmFfnConnector, address_of
from afdpatch.runtime.connectors.tcp import TcpAttentionConnector, TcpFfnConnector
from afdpatch.runtime.secret import read_secret
from afdpatch.runtime.status import StatusPage

if TYPE_CHECKING:
    from afdpatch.runtime.connectors.ipc import Compute, GpuEnd


def attention_connectors(config: AfdConfig) -> Callable[[int], AttentionConnector]:
    """A function that makes a connector to an FFN server, by its rank; not connected yet.

    Raises:
        ConfigError: the secret can't be read.
    """
    secret = read_secret(config.secret_file)

    def make(ffn_rank: int) -> AttentionConnector:
        if config.transport == "tcp":
            return TcpAttentionConnector(
                *config.ffn_address(ffn_rank),
                secret=secret,
                spin_us=config.spin_us,
                # A server that computes for long doesn't read, and may do so for as long as a hop may take.
                peer_timeout_s=max(config.peer_timeout_s, config.hop_timeout_s),
            )
        return ShmAttentionConnector(
            address_of(config.host, config.port, ffn_rank), secret=secret, spin_us=config.spin_us
        )

    return make


def ffn_connector(config: AfdConfig, rank: int, page: StatusPage | None = None) -> FfnConnector:
    """The connector of the FFN server whose first rank is ``rank``; not listening yet.

    Raises:
        ConfigError: the secret can't be read.
    """
    secret = read_secret(config.secret_file)
    if config.transport == "tcp":
        return TcpFfnConnector(
            *config.ffn_address(rank),
            secret=secret,
            spin_us=config.spin_us,
            page=page,
            peer_timeout_s=config.peer_timeout_s,
        )
    return ShmFfnConnector(
        address_of(config.host, config.port, rank),
        secret=secret,
        spin_us=config.spin_us,
        page=page,
        peer_timeout_s=config.peer_timeout_s,
    )


def gpu_end(config: AfdConfig) -> GpuEnd:
    """What all connections of an attention rank on a GPU share, for `gpu_connectors`."""
    from afdpatch.runtime.connectors.ipc import GpuEnd

    if config.transport == "nccl":
        from afdpatch.runtime.connectors.nccl import NcclBuffers

        return GpuEnd(config.hop_timeout_s, NcclBuffers, uniform=True)
    return GpuEnd(config.hop_timeout_s)


def gpu_connectors(config: AfdConfig, end: GpuEnd) -> Callable[[int], AttentionConnector]:
    """As `attention_connectors`, with transport ``ipc`` or ``nccl``: all connections share one end on the GPU.

    Raises:
        ConfigError: the secret can't be read.
    """
    from afdpatch.runtime.connectors.ipc import IpcAttentionConnector
    from afdpatch.runtime.connectors.nccl import NcclAttentionConnector

    secret = read_secret(config.secret_file)

    def make(ffn_rank: int) -> AttentionConnector:
        if config.transport == "nccl":
            return NcclAttentionConnector(
                *config.ffn_address(ffn_rank),
                end,
                secret=secret,
                peer_timeout_s=max(config.peer_timeout_s, config.hop_timeout_s),
            )
        return IpcAttentionConnector(address_of(config.host, config.port, ffn_rank), end, secret=secret)

    return make


def gpu_ffn_connector(
    config: AfdConfig,
    rank: int,
    compute: Compute,
    freeze: Callable[[bool], None],
    page: StatusPage | None = None,
) -> FfnConnector:
    """The connector of an FFN server on a GPU; ``compute`` and ``freeze`` as `IpcFfnConnector` has them.

    Raises:
        ConfigError: the secret can't be read.
    """
    from afdpatch.runtime.connectors.ipc import IpcFfnConnector
    from afdpatch.runtime.connectors.nccl import NcclFfnConnector

    secret = read_secret(config.secret_file)
    if config.transport == "nccl":
        return NcclFfnConnector(
            *config.ffn_address(rank),
            compute,
            freeze=freeze,
            merge=config.merge,
            hop_timeout_s=config.hop_timeout_s,
            secret=secret,
            page=page,
            peer_timeout_s=config.peer_timeout_s,
        )
    return IpcFfnConnector(
        address_of(config.host, config.port, rank),
        compute,
        freeze=freeze,
        merge=config.merge,
        hop_timeout_s=config.hop_timeout_s,
        secret=secret,
        page=page,
        peer_timeout_s=config.peer_timeout_s,
    )
