"""The contract of a connector, one class a side, and the errors that every transport raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from afdpatch.runtime.protocol import Greeting, Header, Mismatch


class ConnectorError(RuntimeError):
    """Anything that keeps a connector from doing what it was asked for."""


class InvalidHop(ConnectorError, ValueError):
    """The tensor, layer or micro-batch doesn't fit what was greeted; nothing was sent, the connection is as before."""


class PeerLost(ConnectorError):
    """The other side ended, or the connection broke and is closed; a new one may send the hop again."""


class HopTimeout(PeerLost):
    """No answer within the deadline; the connection was closed, since a late answer could be taken for a newer one."""


class FfnError(ConnectorError):
    """The FFN's computation failed; its text is in the message. The connection is as before."""


class NoFfnServer(ConnectorError):
    """No FFN server answered a hop, its repeats included, before the deadline."""


class StepLost(ConnectorError):
    """The connection broke while a step was on the GPU: what it gave is worthless; it may go well over a new one."""


class Unreachable(ConnectorError):
    """Nobody listens at the address, or nobody answered the greeting in time; trying again may help."""


class ConnectTimeout(ConnectorError):
    """FFN servers weren't there, or hadn't their weights, within the deadline."""


class AddressInUse(ConnectorError):
    """Another server listens at this address, or it isn't an address of this host."""


class ConnectionRefused(ConnectorError):
    """The FFN server answered, and doesn't take this peer. ``retry``: it may do so later (it drains, it is crowded)."""

    retry = False

    def __init__(self, text: str, *, retry: bool = False) -> None:
        super().__init__(text)
        self.retry = retry


class GreetingMismatch(ConnectionRefused):
    """The two servers don't fit together; ``mismatches`` names the fields, *ours* being this side's value."""

    def __init__(self, text: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(text)
        self.mismatches = tuple(mismatches)


class IncomingHop(NamedTuple):
    """A hop as the FFN side has it.

    ``peer`` numbers the connection, and no other connection ever has this number. ``rank`` is the attention rank.
    ``hidden`` has the shape [rows, hidden] and lies in memory of the connection: it is valid until the reply, and may
    be overwritten.
    """

    peer: int
    header: Header
    hidden: Tensor
    rank: int = 0


MERGED_ROWS = 512
"""Hops are computed together up to so many rows: beyond them the time grows with the rows, and the first ones would
wait for the others without a gain."""


def batches(hops: Sequence[IncomingHop], most: int = MERGED_ROWS) -> Iterator[list[IncomingHop]]:
    """Hops in their order, cut where a batch of several would have more than ``most`` rows."""
    batch: list[IncomingHop] = []
    rows = 0
    for hop in hops:
        if batch and rows + hop.header.rows > most:
            yield batch
            batch, rows = [], 0
        batch.append(hop)
        rows += hop.header.rows
    if batch:
        yield batch


class PeerInfo(NamedTuple):
    """One connected attention rank, as its FFN server sees it; ``heard_ns`` is CLOCK_MONOTONIC of its last message."""

    rank: int
    pid: int
    """0 where it isn't known (a peer on another host)."""
    heard_ns: int
    waiting: int
    """Hops of it that have arrived and aren't answered."""


class AttentionConnector(ABC):
    """One connection to one FFN server, for the side that sends hops.

    It is connected once and closed once; for a new connection there is a new object, so that nothing of an old one,
    a late answer above all, can reach a newer hop. One hop is on its way at a time; concurrent calls wait for each
    other. Any thread may call any method; ``close`` ends whatever waits. All deadlines are CLOCK_MONOTONIC in seconds.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """The address, as it is written in messages."""

    @property
    @abstractmethod
    def serving(self) -> bool:
        """Whether the FFN server has its weights, as far as it has said so by now."""

    @abstractmethod
    def connect(self, greeting: Greeting, deadline_s: float) -> Greeting:
        """Try once to reach the FFN server and greet it; gives back its greeting.

        Raises:
            Unreachable: nobody there, or no answer by the deadline. GreetingMismatch, ConnectionRefused. PeerLost:
            this connector was closed meanwhile. After any of them this object is of no more use.
        """

    @abstractmethod
    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the FFN server has its weights; returns at once when it has.

        Raises:
            PeerLost: it ended. ConnectTimeout: past the deadline; the connection stays.
        """

    @abstractmethod
    def hop(
        self,
        hidden: Tensor,
        layer: int,
        micro_batch: int = 0,
        *,
        sequence: int,
        step: int,
        deadline_s: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """One layer's FFN, computed by the peer.

        Args:
            hidden: [rows, hidden_size] of the greeting's dtype, of any strides; rows from 0 to ``max_rows``.
            layer: index of the decoder layer.
            micro_batch: from 0 to below the greeting's ``micro_batches``.
            sequence: number of the hop: higher than that of every hop before on this connection.
            step: number of the forward that the hop belongs to.
            deadline_s: past it the connection is closed.
            out: where the result goes: contiguous, of the same shape, dtype and device. None: a fresh tensor.

        Returns:
            The result, of the same shape and dtype: ``out`` where given.

        Raises:
            InvalidHop, FfnError: the connection stays. PeerLost, HopTimeout: it is closed; any other exception (a
            signal handler's) closes it too.
        """

    @abstractmethod
    def ping(self, silent_s: float) -> None:
        """Give a sign of life, unless a hop is on its way, which is one. Never waits, never fails.

        The connection is closed when an earlier one has had no answer for ``silent_s`` seconds: a server that was
        stopped keeps its connection, and nothing else tells.
        """

    @abstractmethod
    def peer_alive(self) -> bool:
        """Whether the connection stands, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and give back everything; a waiting call of another thread ends with PeerLost."""


class FfnConnector(ABC):
    """The side that answers hops, of any number of peers.

    All methods but ``set_serving``, ``drain``, ``resume`` and ``wake`` belong to one thread, which calls ``receive``
    again and again: within it peers are greeted, and those that say nothing for too long are dropped.
    """

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
    def receive(self, timeout_s: float) -> list[IncomingHop]:
        """Hops of one layer that have arrived by now, in order of arrival; each must be answered before the next call.

        The oldest hop is always among them, with all others of its layer; the rest stay for the next calls.
        Empty after at most ``timeout_s`` seconds without a hop, or when woken.

        Raises:
            GreetingMismatch: who would have been the first peer ever doesn't fit, and was told so. Later ones are
            refused and counted: others use this server.
        """

    @abstractmethod
    def reply(self, hop: IncomingHop, result: Tensor) -> None:
        """Answer a hop with [rows, hidden_size]; never waits. A peer that has gone is dropped without an error.

        Raises:
            InvalidHop: the result's shape or dtype isn't that of the hop; nothing was sent.
        """

    @abstractmethod
    def reply_error(self, hop: IncomingHop, text: str) -> None:
        """Answer a hop with an error text; never waits."""

    @abstractmethod
    def drain(self) -> None:
        """Let the peers go: hops that have arrived are answered, then each peer gets a goodbye.

        New ones are told to try again later. The address stays taken.
        """

    @abstractmethod
    def resume(self) -> None:
        """Take peers again after ``drain``."""

    @property
    @abstractmethod
    def draining(self) -> bool:
        """Whether ``drain`` was called last, not ``resume``."""

    @abstractmethod
    def peers(self) -> list[PeerInfo]:
        """The connected peers by rank."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Hops that have arrived and that ``receive`` hasn't given out yet."""

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting ``receive`` return."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the peers and give back everything; closing twice is fine."""
