"""One connection of an FFN server: before its greeting (``Pending``), and as a greeted attention rank (``Peer``)."""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod

from torch import Tensor

from afdpatch.runtime.protocol import Greeting, Header, HopLimits, Kind, ProtocolError
from afdpatch.runtime.secret import Handshake

QUIET = frozenset({int(Kind.PING), int(Kind.BYE)})
"""Kinds of an attention rank's messages that bring no hop."""


class Pending(ABC):
    """A connection that hasn't greeted yet."""

    def __init__(self, sock: socket.socket, who: str, pid: int, handshake: Handshake, deadline_s: float) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.who = who
        self.pid = pid
        self.handshake = handshake
        self.deadline_s = deadline_s
        self.challenged = False
        self.objection: str | None = None
        """Why it isn't taken, whatever it may say."""

    @abstractmethod
    def hear(self) -> bytes | None:
        """The next message of text, b"" when the peer closed, None while it hasn't all arrived.

        Raises:
            ProtocolError, OSError.
        """

    @abstractmethod
    def say(self, text: bytes) -> None:
        """Send a message of text, without waiting. Raises OSError."""

    @abstractmethod
    def become_peer(self, number: int, greeting: Greeting) -> Peer:
        """The peer that this connection is from now on. Raises ProtocolError or OSError."""

    def end(self) -> None:
        """Close what came with the greeting, and the socket."""
        self.sock.close()


class Peer(ABC):
    """A greeted attention rank.

    Args:
        pending: what it was before.
        number: of the connection.
        greeting: the rank's.
        inline: whether the payload follows the header.
    """

    def __init__(self, pending: Pending, number: int, greeting: Greeting, *, inline: bool) -> None:
        self.number = number
        self.sock = pending.sock
        self.fd = pending.fd
        self.who = pending.who
        self.pid = pending.pid
        self.rank = greeting.rank
        self.instance = greeting.instance
        self.heard_ns = self.answered_ns = time.monotonic_ns()
        self.unanswered: set[int] = set()
        """Micro-batches whose hop has arrived and isn't answered."""
        self._limits = HopLimits(greeting, inline=inline)
        self._last_sequence = 0

    def admit(self, header: Header) -> None:
        """Hold a HOP against the greeting and what came before it. Raises ProtocolError."""
        self._limits.check(header)
        if header.sequence <= self._last_sequence:
            raise ProtocolError("sequence", header.sequence, f"above {self._last_sequence}, the one before")
        if header.micro_batch in self.unanswered:
            raise ProtocolError("micro_batch", header.micro_batch, "no second hop before the first one's answer")
        self._last_sequence = header.sequence

    @property
    def interest(self) -> int:
        """The events of its socket that matter."""
        return select.POLLIN

    @abstractmethod
    def read(self) -> Header | None:
        """The next whole message, admitted if it is a HOP; None while there is none.

        Raises:
            ProtocolError: it breaks the protocol. OSError, EOFError: it has gone.
        """

    @abstractmethod
    def hidden(self, header: Header) -> Tensor:
        """The rows of a hop that ``read`` gave, as they lie in memory."""

    @abstractmethod
    def answer(self, header: Header, result: Tensor) -> None:
        """Send the result, of the hop's shape and dtype, without waiting. Raises OSError."""

    @abstractmethod
    def send(self, message: bytes | bytearray) -> None:
        """Send a message without payload, without waiting. Raises OSError."""

    def flush(self) -> None:  # noqa: B027 - most transports send at once or not at all
        """Go on with what could not be sent at once. Raises OSError."""

    def close(self) -> None:
        """Close the socket and give back the buffers."""
        self.sock.close()
