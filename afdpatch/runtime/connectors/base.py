"""The contract of a connector, one class a side, and the errors that every transport raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from afdpatch.runtime.protocol import Greeting, Header, Mismatch


class ConnectorError(RuntimeError):
    """Anything that keeps a connector from doing what it was asked for."""


class InvalidHop(ConnectorError, ValueError):
    """The tensor, layer or micro-batch doesn't fit what was greeted; nothing was sent, the connection is as before."""


class PeerLost(ConnectorError):
    """The other side ended, or the connection broke; connect again, then send the hop again."""


class HopTimeout(PeerLost):
    """No answer within the deadline; the connection was closed, since a late answer could be taken for a newer one."""


class FfnError(ConnectorError):
    """The FFN's computation failed; its text is in the message. The connection is as before."""


class ConnectTimeout(ConnectorError):
    """No FFN server answered within the deadline."""


class AddressInUse(ConnectorError):
    """Another FFN server listens at this address."""


class ConnectionRefused(ConnectorError):
    """The FFN server answered, and doesn't take this peer; trying again won't help."""


class GreetingMismatch(ConnectionRefused):
    """The two servers don't fit together; ``mismatches`` names the fields, *ours* being this side's value."""

    def __init__(self, text: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(text)
        self.mismatches = tuple(mismatches)


class IncomingHop(NamedTuple):
    """A hop as the FFN side has it.

    ``hidden`` has the shape [rows, hidden] and lies in memory shared with the peer: it is valid until the reply, and
    may be overwritten.
    """

    peer: int
    header: Header
    hidden: Tensor


class AttentionConnector(ABC):
    """The side that sends hops. One hop is in flight at a time; concurrent calls wait for each other."""

    step: int = 0
    """Number of the current forward; the caller sets it, every hop carries it."""

    @abstractmethod
    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> Greeting:
        """Find the FFN server, greet it and give back its greeting; also after the connection was lost.

        Args:
            greeting: of role ``attention``; it sizes the buffers.
            deadline_s: CLOCK_MONOTONIC in seconds until which to try (default: now + ``connect_timeout_s``).

        Raises:
            GreetingMismatch, ConnectionRefused, ConnectTimeout.
        """

    @abstractmethod
    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Wait until the FFN server has its weights; returns at once when it has.

        Raises:
            PeerLost: it ended; or ConnectTimeout past the deadline (default: now + ``connect_timeout_s``).
        """

    @abstractmethod
    def hop(self, hidden: Tensor, layer: int, micro_batch: int = 0) -> Tensor:
        """One layer's FFN, computed by the peer.

        Args:
            hidden: [rows, hidden_size] of the greeting's dtype on the CPU, of any strides; rows from 0 to ``max_rows``.
            layer: index of the decoder layer.
            micro_batch: which pair of buffers to use.

        Returns:
            A fresh tensor of the same shape and dtype.

        Raises:
            InvalidHop, FfnError: the connection stays. PeerLost, HopTimeout: connect again; the next hop has the same
            sequence number, so that a repeated hop is the same hop.
        """

    @abstractmethod
    def peer_alive(self) -> bool:
        """Whether the connection stands, without waiting and without reading from it; any thread may ask."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and give back everything; closing twice is fine."""


class FfnConnector(ABC):
    """The side that answers hops. All methods but ``set_serving`` and ``wake`` belong to one thread."""

    @abstractmethod
    def listen(self, greeting: Greeting) -> None:
        """Take the address; peers are greeted within ``receive``.

        Raises:
            AddressInUse.
        """

    @abstractmethod
    def set_serving(self) -> None:
        """From now on hops are received; until then peers are greeted and their hops wait."""

    @abstractmethod
    def receive(self, timeout_s: float) -> IncomingHop | None:
        """The next hop in order of arrival, or None after at most ``timeout_s`` seconds, or when woken."""

    @abstractmethod
    def reply(self, hop: IncomingHop, result: Tensor) -> None:
        """Answer a hop with [rows, hidden_size]; a peer that has gone meanwhile is dropped without an error.

        Raises:
            InvalidHop: the result's shape or dtype isn't that of the hop; nothing was sent.
        """

    @abstractmethod
    def reply_error(self, hop: IncomingHop, text: str) -> None:
        """Answer a hop with an error text."""

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting ``receive`` return; any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the peers and give back everything; closing twice is fine."""
