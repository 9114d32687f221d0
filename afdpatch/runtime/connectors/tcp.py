"""The `tcp` connector: hops between hosts, over plain TCP connections to the FFN server's port.

Greetings are text with its length before it; then each message is a header, with the payload behind a HOP and a
REPLY. Limits are checked before the payload is read. A peer is proved by a shared secret; nothing is encrypted.
"""

from __future__ import annotations

from afdpatch.runtime.connectors.tcp_attention import TcpAttentionConnector
from afdpatch.runtime.connectors.tcp_ffn import TcpFfnConnector

__all__ = ["TcpAttentionConnector", "TcpFfnConnector"]
