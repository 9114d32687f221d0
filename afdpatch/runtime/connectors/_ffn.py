"""The FFN side of every connector over sockets: listening, greeting, the queue of hops, draining, lost peers."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from abc import abstractmethod
from dataclasses import replace

from torch import Tensor

from afdpatch.runtime.connectors._peer import Peer, Pending
from afdpatch.runtime.connectors.base import FfnConnector, GreetingMismatch, IncomingHop, InvalidHop, PeerInfo
from afdpatch.runtime.events import Event, emit, logfmt
from afdpatch.runtime.protocol import (
    Greeting,
    Kind,
    ProtocolError,
    Refusal,
    advice,
    compare,
    control,
    decode_answer,
    error_message,
)
from afdpatch.runtime.secret import CROWDED, DRAINS, Handshake, SecretError
from afdpatch.runtime.status import StatusPage

_MAX_PENDING = 32
_QUIET_NS = 3_000_000_000
"""A living peer pings twice a second; one that has been quiet for so long may be a host that has gone."""
_LOOK_NS = 250_000_000
_PING, _BYE = int(Kind.PING), int(Kind.BYE)
_PONG = control(Kind.PONG)
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR
log = logging.getLogger(__name__)


class SocketFfnConnector(FfnConnector):
    """What the transports share; each of them opens the listener and has its own ``Pending`` and ``Peer``.

    Args:
        where: the address, as messages name it.
        secret: shared with the attention servers, or None.
        spin_us: how long to look for the next hop before sleeping, in microseconds.
        page: counts peers, refusals and losses there.
        greeting_timeout_s: a connection that hasn't greeted by then is dropped.
        peer_timeout_s: a peer that owes the next message and sends none, not even a PING, is dropped.
    """

    def __init__(
        self,
        where: str,
        *,
        secret: bytes | None = None,
        spin_us: int = 50,
        page: StatusPage | None = None,
        greeting_timeout_s: float = 5.0,
        peer_timeout_s: float = 30.0,
    ) -> None:
        self._where = where
        self._secret = secret
        self._spin_ns = spin_us * 1000
        self._page = page
        self._greeting_timeout_s = greeting_timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._greeting: Greeting | None = None
        self._listener: socket.socket | None = None
        self._wake_fd = -1
        self._wake_lock = threading.Lock()
        self._poll = select.poll()
        self._pending: dict[int, Pending] = {}
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._numbers: dict[int, Peer] = {}  # by number of the connection
        self._last_number = 0
        self._arrived: list[IncomingHop] = []
        self._lost_ranks: set[int] = set()
        self._serving_asked = False
        self._serving = False
        self._draining = False
        self._deaf = False  # no newcomers until the next look: there was no descriptor for one
        self._looked_ns = 0

    @abstractmethod
    def _listen(self) -> socket.socket:
        """The listening socket, which doesn't block. Raises AddressInUse."""

    @abstractmethod
    def _receive_stranger(self, sock: socket.socket, handshake: Handshake, deadline_s: float) -> Pending:
        """A connection that was just accepted. Raises OSError: it has gone."""

    def listen(self, greeting: Greeting) -> None:
        self._listener = self._listen()
        self._greeting = greeting
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def set_serving(self) -> None:
        self._serving_asked = True
        self.wake()

    def drain(self) -> None:
        self._draining = True
        self.wake()

    def resume(self) -> None:
        self._draining = False
        self.wake()

    @property
    def draining(self) -> bool:
        return self._draining

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def peers(self) -> list[PeerInfo]:
        found = (PeerInfo(peer.rank, peer.pid, peer.heard_ns, len(peer.unanswered)) for peer in self._peers.values())
        return sorted(found)

    @property
    def waiting(self) -> int:
        return len(self._arrived)

    # Receiving

    def receive(self, timeout_s: float) -> list[IncomingHop]:
        if self._serving_asked and not self._serving:
            self._begin_serving()
        end_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        left_s = timeout_s
        while True:
            # Hops that wait here are given out now, with those that have arrived beside them; and who is to be let go
            # goes when nothing more of it has arrived.
            at_once = (self._arrived and self._serving) or (self._draining and self._free())
            found = self._wait(0.0 if at_once else left_s)
            woken = False
            for fd, event in found:
                peer = self._peers.get(fd)
                if peer is not None:
                    self._peer_event(peer, event)
                elif fd == self._wake_fd:
                    os.eventfd_read(fd)
                    woken = True
                else:
                    self._other_event(fd)
            now_ns = time.monotonic_ns()
            if now_ns - self._looked_ns > _LOOK_NS:
                self._looked_ns = now_ns
                self._drop_silent(now_ns)
                if self._deaf and self._listener is not None:
                    self._poll.register(self._listener, select.POLLIN)
                    self._deaf = False
            if self._draining:
                self._let_go()
            if self._serving and self._arrived:
                return self._take()
            # Events that bring no hop, however many, must not keep the caller's heart from beating.
            if woken or not found or now_ns >= end_ns:
                return []
            left_s = (end_ns - now_ns) / 1e9

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Events, after a short spin or a sleep; none past the timeout."""
        poll = self._poll.poll
        if timeout_s and self._peers and self._serving:
            spin_until_ns = time.monotonic_ns() + self._spin_ns
            while True:
                found = poll(0)
                if found:
                    return found
                if time.monotonic_ns() >= spin_until_ns:
                    break
        return poll(timeout_s * 1000)

    def _take(self) -> list[IncomingHop]:
        arrived = self._arrived
        layer = arrived[0].header.layer
        self._arrived = [hop for hop in arrived if hop.header.layer != layer]
        return arrived if not self._arrived else [hop for hop in arrived if hop.header.layer == layer]

    def _peer_event(self, peer: Peer, event: int) -> None:
        try:
            if event & select.POLLOUT:
                peer.flush()
                self._poll.modify(peer.fd, peer.interest)
                if not event & ~select.POLLOUT:
                    return
            header = peer.read()
        except ProtocolError as error:
            self._broke(peer, error)
            return
        except (OSError, EOFError) as error:
            self._lose(peer, f"connection closed without goodbye ({error})")
            return
        if header is None:
            return
        peer.heard_ns = time.monotonic_ns()
        if header.kind == _PING:
            self._send(peer, _PONG)
            return
        if header.kind == _BYE:
            self._drop(peer)
            log.info("attention rank %d (%s) said goodbye", peer.rank, peer.who)
            return
        peer.unanswered.add(header.micro_batch)
        self._arrived.append(IncomingHop(peer.number, header, peer.hidden(header), peer.rank))

    def _other_event(self, fd: int) -> None:
        assert self._listener is not None
        if fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd in self._pending:
            self._hear(self._pending[fd])

    # Greeting

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptor is free: the peers that are here go on, newcomers wait a little
            self._refused(f"a connection could not be taken: {error.strerror}")
            self._poll.unregister(listener)
            self._deaf = True
            return
        sock.setblocking(False)
        deadline_s = time.monotonic() + self._greeting_timeout_s
        try:
            pending = self._receive_stranger(sock, Handshake("ffn", self._secret), deadline_s)
        except OSError as error:
            log.debug("%s: a connection ended before it was taken: %s", self._where, error)
            sock.close()
            return
        if pending.objection is not None:
            self._end_pending(pending, Refusal(pending.objection))
            return
        if len(self._pending) >= _MAX_PENDING:
            self._end_pending(pending, Refusal(CROWDED, retry=True))
            return
        self._pending[pending.fd] = pending
        self._poll.register(pending.fd, select.POLLIN)

    def _hear(self, pending: Pending) -> None:
        refusal: Refusal | None = None
        try:
            message = pending.hear()
            if message is None:
                return
            if not message:
                self._left(pending, "connection closed")
            elif self._draining:
                refusal = Refusal(DRAINS, retry=True)
            elif not pending.challenged:
                pending.say(pending.handshake.challenge(message))
                pending.challenged = True
            else:
                refusal = self._greet(pending, message)
        except ProtocolError as error:
            log.debug("%s: %s greeted wrongly: %s", self._where, pending.who, logfmt(error))
            refusal = Refusal(f"{pending.who}: {error.plain}", error.other_version)
        except SecretError as error:
            refusal = Refusal(str(error))
        except OSError as error:
            self._left(pending, str(error))
        if refusal is not None:
            self._end_pending(pending, refusal)

    def _greet(self, pending: Pending, message: bytes) -> Refusal | None:
        """Take the greeting, whose sender is a peer from now on; or why not."""
        assert self._greeting is not None
        if message.startswith(b'{"refused"'):
            said = decode_answer(message)
            reason = pending.handshake.believed(said).reason if isinstance(said, Refusal) else "it doesn't say why"
            return Refusal(f"{pending.who} doesn't take this server: {reason}")
        theirs = Greeting.decode(pending.handshake.open(message))
        found = compare(self._greeting, theirs)
        if found:
            return Refusal(f"attention rank {theirs.rank} doesn't fit this FFN server", tuple(found))
        if (refusal := self._claim(theirs)) is not None:
            return refusal
        peer = pending.become_peer(self._last_number + 1, theirs)
        try:
            own = replace(self._greeting, state="serving" if self._serving else "loading")
            pending.say(pending.handshake.seal(own.encode()))
        except OSError:
            peer.close()
            raise
        self._last_number = peer.number
        del self._pending[peer.fd]
        self._peers[peer.fd] = self._numbers[peer.number] = peer
        self._poll.modify(peer.fd, peer.interest)
        self._count_peers()
        if peer.rank in self._lost_ranks:
            self._lost_ranks.discard(peer.rank)
            self._tell(Event.PEER_RETURNED, peer)
        log.info("attention rank %d (%s) connected at %s", peer.rank, peer.who, self._where)
        return None

    def _claim(self, theirs: Greeting) -> Refusal | None:
        """Whether somebody else has the rank; an old connection of the same process, or of a dead one, makes room."""
        old = next((peer for peer in self._peers.values() if peer.rank == theirs.rank), None)
        if old is None:
            return None
        poll = select.poll()
        poll.register(old.sock, select.POLLRDHUP)
        if any(event & _ENDED for _, event in poll.poll(0)):
            self._lose(old, "connection closed without goodbye")
            return None
        if old.instance == theirs.instance:
            self._lose(old, "its process has connected again")
            return None
        return Refusal(
            f"attention rank {theirs.rank} is connected already ({old.who}); "
            f"give each pair a port of its own, or each attention server a rank of its own",
            retry=time.monotonic_ns() - old.heard_ns > _QUIET_NS,
        )

    def _begin_serving(self) -> None:
        self._serving = True
        for peer in list(self._peers.values()):
            self._send(peer, control(Kind.READY))

    # Refusing and dropping

    def _drop_silent(self, now_ns: int) -> None:
        for pending in list(self._pending.values()):
            if now_ns >= pending.deadline_s * 1e9:
                text = f"{pending.who} sent no greeting within {self._greeting_timeout_s:g} s"
                self._end_pending(pending, Refusal(text, retry=True))
        for peer in list(self._peers.values()):
            # Who waits for an answer need not speak.
            silent_ns = now_ns - max(peer.heard_ns, peer.answered_ns)
            if silent_ns > self._peer_timeout_s * 1e9 and not peer.unanswered:
                self._lose(peer, f"it gave no sign of life for {silent_ns / 1e9:.1f} s")

    def _end_pending(self, pending: Pending, refusal: Refusal) -> None:
        """Tell a connection why it isn't taken, and close it.

        Raises:
            GreetingMismatch: it was to be the first peer of this server's life, and doesn't fit it.
        """
        self._forget(pending)
        if refusal.reason == DRAINS:  # nothing is wrong: the drain is an event of its own
            log.info("%s: %s is told that this server drains", self._where, pending.who)
        else:
            self._refused("; ".join([refusal.reason, *map(str, refusal.mismatches)]), pending.who)
        try:
            pending.say(refusal.encode())
        except OSError as error:
            log.debug("a refused process had gone: %s", error)
        pending.end()
        if refusal.mismatches and pending.handshake.proved and not self._last_number:
            listed = "; ".join(map(str, refusal.mismatches))
            raise GreetingMismatch(
                f"{pending.who} doesn't fit the FFN server at {self._where}, which has had no peer yet: {listed}; "
                f"{advice(refusal.mismatches)}",
                refusal.mismatches,
            )

    def _forget(self, pending: Pending) -> None:
        if self._pending.pop(pending.fd, None) is not None:
            self._poll.unregister(pending.fd)

    def _left(self, pending: Pending, why: str) -> None:
        """A connection that ended before it had greeted: nobody was refused."""
        self._forget(pending)
        pending.end()
        log.info("%s: %s left during its greeting (%s)", self._where, pending.who, why)

    def _refused(self, text: str, who: str | None = None) -> None:
        if self._page is not None:
            self._page.count(Event.REFUSED, text)
        emit(log, Event.REFUSED, role="ffn", rank=self._rank, at=self._where, peer=who, why=text)

    def _broke(self, peer: Peer, error: ProtocolError) -> None:
        text = f"attention rank {peer.rank} ({peer.who}): {error}"
        if self._page is not None:
            self._page.count(Event.DROPPED, text)
        emit(log, Event.DROPPED, role="ffn", rank=self._rank, peer=f"attention{peer.rank}", who=peer.who, why=error)
        self._lose(peer, str(error))

    def _lose(self, peer: Peer, why: str) -> None:
        """End a connection that nobody said goodbye on."""
        self._lost_ranks.add(peer.rank)
        self._tell(Event.PEER_LOST, peer, why)  # before the page has a peer less
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """End a connection and free its memory."""
        del self._peers[peer.fd], self._numbers[peer.number]
        self._arrived = [hop for hop in self._arrived if hop.peer != peer.number]
        self._poll.unregister(peer.fd)
        peer.close()
        self._count_peers()

    def _tell(self, event: Event, peer: Peer, why: str | None = None) -> None:
        if self._page is not None:
            self._page.count(event)
        emit(log, event, role="ffn", rank=self._rank, peer=f"attention{peer.rank}", who=peer.who, why=why)

    def _count_peers(self) -> None:
        if self._page is not None:
            self._page.set_peers(len(self._peers))

    @property
    def _rank(self) -> int:
        return self._greeting.rank if self._greeting is not None else 0

    def _let_go(self) -> None:
        """While draining: a goodbye to every peer whose hops are answered."""
        for peer in self._free():
            self._goodbye(peer)

    def _free(self) -> list[Peer]:
        """Peers that nothing is owed to: their hops are answered and the answers are on their way, or none will be."""
        return [
            peer
            for peer in self._peers.values()
            if not self._serving or not (peer.unanswered or peer.interest != select.POLLIN)
        ]

    def _goodbye(self, peer: Peer) -> None:
        try:
            peer.send(control(Kind.BYE))
        except OSError as error:
            log.debug("attention rank %d had gone: %s", peer.rank, error)
        self._drop(peer)

    # Answering

    def reply(self, hop: IncomingHop, result: Tensor) -> None:
        peer = self._numbers.get(hop.peer)
        if peer is None:
            return
        header, hidden = hop.header, hop.hidden
        if result.shape != hidden.shape or result.dtype is not hidden.dtype:
            raise InvalidHop(
                f"the FFN of layer {header.layer} gave {result.dtype} {list(result.shape)}, "
                f"expected {hidden.dtype} {list(hidden.shape)}"
            )
        peer.unanswered.discard(header.micro_batch)
        peer.answered_ns = time.monotonic_ns()
        try:
            peer.answer(header, result)
        except OSError as error:  # gone, or it lets its answers pile up
            self._lose(peer, f"the answer could not be sent ({error})")
            return
        if peer.interest != select.POLLIN:
            self._poll.modify(peer.fd, peer.interest)

    def reply_error(self, hop: IncomingHop, text: str) -> None:
        peer = self._numbers.get(hop.peer)
        if peer is not None:
            peer.unanswered.discard(hop.header.micro_batch)
            peer.answered_ns = time.monotonic_ns()
            self._send(peer, error_message(hop.header, text))

    def _send(self, peer: Peer, message: bytes) -> None:
        try:
            peer.send(message)
        except OSError as error:
            self._lose(peer, f"it could not be told anything ({error})")
            return
        if peer.interest != select.POLLIN:
            self._poll.modify(peer.fd, peer.interest)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._goodbye(peer)
        for pending in self._pending.values():
            pending.end()
        self._pending.clear()
        self._arrived.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
