"""An attention rank's connections to its FFN servers: made, lost, looked after and closed, and which of them serve.

The servers of the rank's own block are its *home* servers; those of other blocks are used while none of them serves.
Of what goes over a connection nothing is known here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import (
    AttentionConnector,
    ConnectionRefused,
    ConnectorError,
    ConnectTimeout,
    GreetingMismatch,
    PeerLost,
    Unreachable,
)
from afdpatch.runtime.connectors.factory import attention_connectors
from afdpatch.runtime.events import Event, emit
from afdpatch.runtime.protocol import Greeting, Mismatch
from afdpatch.runtime.status import PeerState, StatusPage

FIRST_GREETING_S, LONGEST_GREETING_S = 1.0, 8.0
"""How long a server has for its greeting at first, and at most: it is doubled each time that it wasn't enough, since a
server that computes or loads answers late, and one that was stopped never does."""
TEND_GREETING_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
"""Pause between two tries to find a server: the first one, and the longest; each is twice the one before."""
_SLOW_S = 0.5
log = logging.getLogger(__name__)


class End:
    """Whether something has ended, for whoever waits for that.

    As ``threading.Event``, but `set` may come from a signal handler in the midst of this thread's own `wait` or `set`:
    an Event's lock would be held then, for ever.
    """

    def __init__(self) -> None:
        self._ended = False
        self._gate = threading.Lock()  # held until the end, later by whoever passes
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether the end has come."""
        return self._ended

    def set(self) -> None:
        """It has come; what waits goes on."""
        self._ended = True
        self._open()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, at most so many seconds (0 or more); whether it has come."""
        if self._gate.acquire(timeout=timeout_s):
            self._open()
        return self._ended

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # another one has opened it in between
            self._gate.release()


class Peers:
    """The FFN servers of one attention rank.

    ``connect`` and ``wait_ready`` belong to the thread that starts, ``tend`` to a watching one; ``close`` may come from
    anywhere, a signal handler included, and ends whatever waits; the other methods are any thread's. The attributes are
    for reading. Deadlines are CLOCK_MONOTONIC in seconds.

    Args:
        config: counts, blocks and times.
        rank: of this attention worker.
        page: peers and their state, losses and the like are counted there.
        make_connector: a new connector to the FFN server of a rank (default: the configuration's).
        group: for how many ranks, from ``rank`` on, this one speaks: a tensor-parallel group's size. It uses the FFN
            servers of all of them.

    Attributes:
        home: ranks of the home servers.
        ranks: of all servers that may be used, home servers first, then the others, nearest first.
        greeting: what `connect` greets them with; None before.
        serving: rank and connection of each server in use: of home servers, or, while none serves, of others.
        given_up: whether `give_up` was called and no server has served since.
        last_error: why the last connection was lost, or wasn't made.
        closed: set by `close`.
    """

    def __init__(
        self,
        config: AfdConfig,
        rank: int,
        page: StatusPage | None = None,
        make_connector: Callable[[int], AttentionConnector] | None = None,
        *,
        group: int = 1,
    ) -> None:
        self._config = config
        self._rank = rank
        self._page = page
        self._make = make_connector or attention_connectors(config)
        self._silent_s = config.hop_timeout_s  # a server that computes answers no PING
        self.home = config.ffn_ranks_of(rank, group)
        self.ranks = (*self.home, *config.fallbacks_of(rank, group))
        self.greeting: Greeting | None = None
        self.serving: tuple[tuple[int, AttentionConnector], ...] = ()
        self.given_up = False
        self.last_error = "not connected yet"
        self.closed = End()
        self._ready = False
        # Locks are taken in this order: a hop's (`tend` is given it), then these, then the page's.
        self._dial_lock = threading.Lock()  # held over one greeting
        self._state_lock = threading.RLock()  # held for moments; reentrant for a signal handler's close()
        self._connections: dict[int, AttentionConnector] = {}
        self._dialing: AttentionConnector | None = None
        self._home_serves = False
        self._took_over: int | None = None
        self._has_served = False
        self._lost: set[int] = set()
        self._patience: dict[int, float] = {}
        self._not_before: dict[int, float] = {}

    # Start

    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> None:
        """Greet all home servers, waiting for those that aren't there yet.

        Raises:
            GreetingMismatch, ConnectionRefused: a server doesn't take this one, for good. ConnectTimeout: past the
            deadline (default: now + ``connect_timeout_s``). PeerLost: closed meanwhile.
        """
        self.greeting = greeting
        self._refresh()
        self._greet_home(self._start_deadline(deadline_s))

    def _start_deadline(self, deadline_s: float | None) -> float:
        return time.monotonic() + self._config.connect_timeout_s if deadline_s is None else deadline_s

    def _greet_home(self, deadline: float) -> None:
        """Greet the home servers that aren't connected, again and again. Raises what `connect` does."""
        started = time.monotonic()
        error: ConnectorError | None = None
        pause = FIRST_PAUSE_S
        while True:
            for rank in self.home:
                if rank in self._connections:
                    continue
                try:
                    with self._dial_lock:
                        self._dial(rank, min(deadline, time.monotonic() + self._patience_of(rank)))
                except ConnectionRefused as refused:
                    if not refused.retry:
                        raise
                    error = refused
                except Unreachable as unreachable:
                    error = unreachable
            missing = [f"ffn{rank}" for rank in self.home if rank not in self._connections]
            if not missing:
                return
            # A last try without time for an answer would only hide why the others failed.
            left = deadline - time.monotonic() - FIRST_PAUSE_S
            if left <= 0:
                raise ConnectTimeout(
                    f"{', '.join(missing)} not connected within {time.monotonic() - started:.1f} s: {error}; start "
                    f"each FFN server with the same host and port as this one, or raise connect_timeout_s"
                )
            if self.closed.wait(min(pause, left)):
                raise self.closed_error()
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Wait until all home servers have their weights; one that ends meanwhile is waited for and greeted again.

        Raises:
            As `connect`; ConnectTimeout also where a server still loads.
        """
        started = time.monotonic()
        deadline = self._start_deadline(deadline_s)
        for rank in self.home:
            while True:
                connector = self._connections.get(rank)
                if connector is None:
                    self._greet_home(deadline)
                    continue
                # The wait holds the connection, so nobody else gives its signs of life.
                connector.ping(self._silent_s)
                try:
                    # In short waits, so that a connection that took this one's place is seen.
                    connector.wait_ready(min(deadline, time.monotonic() + 0.5))
                    break
                except ConnectTimeout as error:
                    if time.monotonic() >= deadline:
                        raise ConnectTimeout(
                            f"ffn{rank} is still loading after {time.monotonic() - started:.1f} s; look at its log, "
                            f"or raise connect_timeout_s"
                        ) from error
                except PeerLost as error:
                    self.lose(connector, str(error))
                    if self.closed.wait(FIRST_PAUSE_S):
                        raise
        self._ready = True
        self._refresh()

    # Use

    def find(self, end_s: float) -> None:
        """Lose what doesn't stand any more; where no server serves then, try each one once, until one serves.

        It takes as long as one greeting for each server, and ends at ``end_s``. Raises nothing of a server's.
        """
        self._look()
        if self.serving:
            return
        for rank in self.ranks:
            now = time.monotonic()
            # ``tend`` may be about to connect; it takes no longer than one greeting.
            if now >= end_s or self.closed.is_set() or not self._dial_lock.acquire(timeout=end_s - now):
                return
            try:
                if rank not in self._connections:
                    self._try_to_dial(rank, min(end_s, time.monotonic() + self._patience_of(rank)))
            finally:
                self._dial_lock.release()
            if self.serving:
                return

    def lose(self, connector: AttentionConnector, why: str) -> None:
        """Close a connection, whatever is on its way over it, and count the loss; nothing if it is closed by now."""
        with self._state_lock:
            rank = next((rank for rank, each in self._connections.items() if each is connector), None)
            # Another thread was first, or all are closed: by a signal handler perhaps, just now.
            if rank is None or self._connections.pop(rank, None) is None:
                return
            self._lost.add(rank)
            self.last_error = why
            if self._page is not None:  # before the page says that there is no server
                self._page.count(Event.PEER_LOST, why)
            self._refresh()
        connector.close()
        emit(log, Event.PEER_LOST, role="attention", rank=self._rank, peer=f"ffn{rank}", why=why)

    def lose_all(self, why: str) -> None:
        """`lose` each connection."""
        for connector in list(self._connections.values()):
            self.lose(connector, why)

    def give_up(self) -> None:
        """No server was found in time: the page says so until one serves."""
        self.given_up = True
        self._refresh()

    def count_takeover(self, rank: int) -> None:
        """Another block's server is used: counted each time, told once until a home server serves again."""
        if self._page is not None:
            self._page.count(Event.TAKEOVER)
        if self._took_over != rank:
            self._took_over = rank
            emit(log, Event.TAKEOVER, role="attention", rank=self._rank, peer=f"ffn{rank}")

    def closed_error(self) -> PeerLost:
        """What a wait raises that `close` has ended."""
        return PeerLost("this route to the FFN servers was closed")

    # Upkeep

    def tend(self, in_use: threading.Lock) -> None:
        """Look after the connections, twice a second: signs of life, losses, and ways back. Raises nothing of a peer's.

        It takes as long as one greeting, at most ``TEND_GREETING_S`` seconds, and `find` waits no longer than that for
        it.

        Args:
            in_use: held by others while they use a connection: one that still stands is closed under it only.
        """
        for _, connector in self._look():
            connector.ping(self._silent_s)
        # Until all are ready, the start greets them itself: a mismatch is an error then, and none later.
        if not self._ready or self.closed.is_set():
            return
        wanted = self.home if self.serving else self.ranks
        now = time.monotonic()
        for rank in wanted:
            if rank in self._connections or now < self._not_before.get(rank, 0.0):
                continue
            if not self._dial_lock.acquire(blocking=False):
                break  # a hop is looking for a server itself
            try:
                self._try_to_dial(rank, time.monotonic() + min(self._patience_of(rank), TEND_GREETING_S))
            finally:
                self._dial_lock.release()
            if time.monotonic() - now > _SLOW_S:
                break  # one that doesn't answer is enough for this time
        self._come_home(in_use)

    def close(self) -> None:
        """Say goodbye to all servers; what waits ends with PeerLost. Closing twice is fine."""
        self.closed.set()
        with self._state_lock:
            connectors = [*self._connections.values(), *([self._dialing] if self._dialing is not None else [])]
            self._connections = {}
            self._refresh()
        for connector in connectors:
            connector.close()

    def _look(self) -> list[tuple[int, AttentionConnector]]:
        """The connections that stand; those that don't are lost, and servers that have their weights now serve."""
        standing = []
        for rank, connector in list(self._connections.items()):
            if connector.peer_alive():
                standing.append((rank, connector))
            else:
                self.lose(connector, "the connection has ended")
        self._refresh()
        return standing

    def _come_home(self, in_use: threading.Lock) -> None:
        """Close the connections to other blocks' servers once a home server serves."""
        with self._state_lock:
            away = [rank for rank in self._connections if rank not in self.home] if self._home_serves else []
        if away and in_use.acquire(timeout=0.1):
            try:
                with self._state_lock:
                    connectors = [self._connections.pop(rank) for rank in away if rank in self._connections]
                    self._lost.difference_update(away)
                    self._refresh()
                for connector in connectors:
                    connector.close()
            finally:
                in_use.release()
            log.info("attention rank %d: hops go to the home servers again", self._rank)

    def _dial(self, rank: int, deadline_s: float) -> None:
        """One try to connect to a server. Raises what ``AttentionConnector.connect`` raises."""
        greeting = self.greeting
        assert greeting is not None
        try:
            connector = self._make(rank)
        except OSError as error:
            raise Unreachable(f"no connection to ffn{rank} can be made here: {error.strerror}") from error
        started = time.monotonic()
        try:
            with self._state_lock:
                # Before the look, as below: a signal handler's close() may come in between.
                self._dialing = connector
                if self.closed.is_set():
                    raise self.closed_error()
            theirs = connector.connect(greeting, deadline_s)
            if theirs.rank != rank:
                mismatch = Mismatch("rank", str(rank), str(theirs.rank))
                raise GreetingMismatch(f"the FFN server at {connector.where} is another one: {mismatch}", [mismatch])
            with self._state_lock:
                self._connections[rank] = connector
                if self.closed.is_set():
                    self._connections.pop(rank, None)
                    raise self.closed_error()
                # With it: whoever loses this connection from now on marks the rank as lost anew.
                returned = rank in self._lost
                self._lost.discard(rank)
        except BaseException as error:
            connector.close()
            now = time.monotonic()
            patience = self._patience_of(rank)
            if isinstance(error, Unreachable) and now - started > 0.9 * min(patience, TEND_GREETING_S):
                self._patience[rank] = min(2 * patience, LONGEST_GREETING_S)
                self._not_before[rank] = now + patience
            self.last_error = str(error)
            raise
        finally:
            self._dialing = None
        self._patience.pop(rank, None)
        self._not_before.pop(rank, None)
        if returned:
            self._tell(Event.PEER_RETURNED, rank)
        self._refresh()

    def _try_to_dial(self, rank: int, deadline_s: float) -> None:
        try:
            self._dial(rank, deadline_s)
        except ConnectionRefused as error:
            if not error.retry:
                self._tell(Event.REFUSED, rank, text=str(error), why=error)
        except ConnectorError as error:
            log.debug("ffn%d: %s", rank, error)

    def _patience_of(self, rank: int) -> float:
        return self._patience.get(rank, FIRST_GREETING_S)

    def _refresh(self) -> None:
        """Which servers are used from now on, and what the page says about it."""
        with self._state_lock:
            closed = self.closed.is_set()
            serving = {rank: connector for rank, connector in self._connections.items() if connector.serving}
            home = tuple((rank, serving[rank]) for rank in self.home if rank in serving)
            self._home_serves = bool(home)
            self.serving = home or tuple((rank, serving[rank]) for rank in self.ranks if rank in serving)
            if home:
                self._took_over = None
            if self.serving:
                self._has_served = True
                self.given_up = False
                state = PeerState.CONNECTED
            elif self.given_up:
                state = PeerState.GIVEN_UP
            else:
                state = PeerState.LOST if self._has_served else PeerState.WAITING
            if self._page is not None:
                self._page.set_peers(len(self._connections))
                self._page.set_peer_state(PeerState.NONE if closed else state)
            if self.closed.is_set() is not closed:  # a signal handler's close() came in between: its word is the last
                self._refresh()

    def _tell(self, event: Event, rank: int, *, text: str = "", why: object = None) -> None:
        if self._page is not None:
            self._page.count(event, text)
        emit(log, event, role="attention", rank=self._rank, peer=f"ffn{rank}", why=why)
