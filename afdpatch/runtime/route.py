"""An attention rank's way to its FFN servers: which one a hop goes to, and what happens when that one is lost.

Hops go in turn to the serving servers of the rank's own block, its *home* servers. A hop whose server is lost is sent
again under its own sequence number, over another connection: to another home server, to one that came back, or to a
server of another block (a takeover), until its deadline. An answer counts only on the connection that its hop went
over, and that connection is closed when the hop is given up there: no late answer reaches a newer hop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from torch import Tensor

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import (
    AttentionConnector,
    ConnectionRefused,
    ConnectorError,
    ConnectTimeout,
    FfnError,
    GreetingMismatch,
    NoFfnServer,
    PeerLost,
    Unreachable,
)
from afdpatch.runtime.connectors.factory import attention_connectors
from afdpatch.runtime.events import Event, emit
from afdpatch.runtime.protocol import Greeting, Layout, Mismatch
from afdpatch.runtime.status import PeerState, StatusPage

FIRST_GREETING_S, LONGEST_GREETING_S = 1.0, 8.0
"""How long a server has for its greeting at first, and at most: it is doubled each time that it wasn't enough, since a
server that computes or loads answers late, and one that was stopped never does."""
TEND_GREETING_S = 2.0
QUICK_S = 0.5
"""How long a hop looks for a server where there is none and an earlier hop has been given up."""
LAST_HOP_S = 1.0
"""How long a hop may still take once this server's hops must have ended."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
log = logging.getLogger(__name__)


class Route:
    """Hops of one attention rank.

    ``hop`` belongs to the threads that compute (one at a time goes through), ``tend`` to a watching thread; ``close``
    may come from anywhere, a signal handler included, and ends whatever waits. Deadlines are CLOCK_MONOTONIC in
    seconds.

    Args:
        config: counts, blocks and times.
        rank: of this attention worker.
        page: hops, peers, losses and the like are counted there.
        make_connector: a new connector to the FFN server of a rank (default: the configuration's).
        group: for how many ranks, from ``rank`` on, this one hops: a tensor-parallel group's size. It uses the FFN
            servers of all of them.
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
        self._home = config.ffn_ranks_of(rank, group)
        self._others = config.fallbacks_of(rank, group)
        self._make = make_connector or attention_connectors(config)
        self._hop_timeout_s = config.hop_timeout_s
        self._greeting: Greeting | None = None
        self._ready = False
        self._closed = threading.Event()
        self._hop_lock = threading.Lock()  # held over a whole hop; nothing else waits for it without a limit
        self._dial_lock = threading.Lock()  # held over one greeting
        self._state_lock = threading.RLock()  # held for moments; reentrant for a signal handler's close()
        self._connections: dict[int, AttentionConnector] = {}
        self._dialing: AttentionConnector | None = None
        self._serving: tuple[tuple[int, AttentionConnector], ...] = ()
        self._away = False
        self._took_over: int | None = None
        self._has_served = False
        self._given_up = False
        self._lost: set[int] = set()
        self._patience: dict[int, float] = {}
        self._not_before: dict[int, float] = {}
        self._last_error = "not connected yet"
        self._sequence = 0
        self._row_bytes = 0
        self._step = 0
        self._step_end = math.inf
        self._patience_s = config.recovery_timeout_s
        self._ends_s = math.inf
        self._began_s = math.inf  # of the hop under way

    # Start

    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> None:
        """Greet all home servers, waiting for those that aren't there yet.

        Raises:
            GreetingMismatch, ConnectionRefused: a server doesn't take this one, for good. ConnectTimeout: past the
            deadline (default: now + ``connect_timeout_s``). PeerLost: closed meanwhile.
        """
        self._greeting = greeting
        self._row_bytes = Layout.of(greeting).row_bytes
        self._refresh()
        self._greet_home(self._start_deadline(deadline_s))

    def _start_deadline(self, deadline_s: float | None) -> float:
        return time.monotonic() + self._config.connect_timeout_s if deadline_s is None else deadline_s

    def _greet_home(self, deadline: float) -> None:
        """Greet the home servers that aren't connected, again and again. Raises what `connect` does."""
        started = time.monotonic()
        error: ConnectorError | None = None
        pause = _FIRST_PAUSE_S
        while True:
            for rank in self._home:
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
            missing = [f"ffn{rank}" for rank in self._home if rank not in self._connections]
            if not missing:
                return
            # A last try without time for an answer would only hide why the others failed.
            left = deadline - time.monotonic() - _FIRST_PAUSE_S
            if left <= 0:
                raise ConnectTimeout(
                    f"{', '.join(missing)} not connected within {time.monotonic() - started:.1f} s: {error}; start "
                    f"each FFN server with the same host and port as this one, or raise connect_timeout_s"
                )
            if self._closed.wait(min(pause, left)):
                raise self._closed_error()
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Wait until all home servers have their weights; one that ends meanwhile is waited for and greeted again.

        Raises:
            As `connect`; ConnectTimeout also where a server still loads.
        """
        started = time.monotonic()
        deadline = self._start_deadline(deadline_s)
        for rank in self._home:
            while True:
                connector = self._connections.get(rank)
                if connector is None:
                    self._greet_home(deadline)
                    continue
                # The wait holds the connection, so nobody else gives its signs of life.
                connector.ping(self._hop_timeout_s)
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
                    self._lose(rank, connector, str(error))
                    if self._closed.wait(_FIRST_PAUSE_S):
                        raise
        self._ready = True
        self._refresh()

    # Hops

    def begin_step(self, deadline_s: float | None = None, patience_s: float | None = None) -> None:
        """A forward begins: its hops carry the next step number.

        Args:
            deadline_s: none of them waits beyond it.
            patience_s: how long each of them is tried (default: ``recovery_timeout_s``).
        """
        self._step += 1
        self._step_end = math.inf if deadline_s is None else deadline_s
        self._patience_s = self._config.recovery_timeout_s if patience_s is None else patience_s

    def end_by(self, deadline_s: float) -> None:
        """This server ends: past the deadline no hop waits for a server, and one that waits for an answer is let go.

        To be called again and again while the deadline is known.
        """
        self._ends_s = deadline_s
        now = time.monotonic()
        if now > deadline_s and now - self._began_s > LAST_HOP_S:
            for rank, connector in list(self._connections.items()):
                self._lose(rank, connector, "no answer before this server's end")

    def hop(self, hidden: Tensor, layer: int, micro_batch: int = 0, out: Tensor | None = None) -> Tensor:
        """One layer's FFN, computed by one of the FFN servers.

        Args:
            hidden: [rows, hidden_size] of the greeting's dtype, of any strides; rows from 0 to ``max_rows``.
            layer: index of the decoder layer.
            micro_batch: from 0 to below the greeting's ``micro_batches``.
            out: where the result goes: contiguous, of the same shape, dtype and device. None: a fresh tensor.

        Returns:
            The result, of the same shape and dtype: ``out`` where given.

        Raises:
            InvalidHop: it doesn't fit what was greeted. FfnError: the computation failed, which is not repeated.
            NoFfnServer: none answered within ``recovery_timeout_s`` (or the step's patience) or by the step's deadline;
            later hops then try for half a second only, until a server is back. PeerLost: this route was closed.
        """
        with self._hop_lock:
            began_ns = time.monotonic_ns()
            self._began_s = began_ns / 1e9
            sequence = self._sequence = self._sequence + 1
            serving = self._serving
            try:
                if serving:
                    rank, connector = serving[sequence % len(serving)]
                    if self._away:
                        self._count_takeover(rank)
                    limit = min(began_ns / 1e9 + self._hop_timeout_s, self._step_end)
                    try:
                        result = connector.hop(
                            hidden, layer, micro_batch, sequence=sequence, step=self._step, deadline_s=limit, out=out
                        )
                    except PeerLost as error:
                        self._lose(rank, connector, str(error))
                        result = self._repeat(hidden, layer, micro_batch, out, sequence, began_ns / 1e9, sent=True)
                else:
                    result = self._repeat(hidden, layer, micro_batch, out, sequence, began_ns / 1e9, sent=False)
            except (FfnError, NoFfnServer) as error:
                if self._page is not None:
                    self._page.count(Event.ERROR, str(error))
                raise
            finally:
                self._began_s = math.inf
            rows = len(hidden)
            if self._page is not None and rows:
                self._page.count_hop(rows, rows * self._row_bytes, time.monotonic_ns() - began_ns)
            return result

    def _repeat(
        self,
        hidden: Tensor,
        layer: int,
        micro_batch: int,
        out: Tensor | None,
        sequence: int,
        began_s: float,
        *,
        sent: bool,
    ) -> Tensor:
        """The hop again and again, over whatever connection there is or can be made, until its deadline."""
        if self._greeting is None:
            raise PeerLost("a hop before connect()")
        answer_end = end = min(began_s + self._patience_s, self._step_end)
        if self._given_up:
            end = min(end, time.monotonic() + QUICK_S)  # to find a server; one that is there gets its time to answer
        pause = _FIRST_PAUSE_S
        attempt = 0
        while not self._closed.is_set():
            self._look()
            end = min(end, self._ends_s)
            if not self._serving:
                self._find(end)
            serving = self._serving
            now = time.monotonic()
            if now >= end:
                raise self._give_up(layer, sequence, now - began_s)
            if serving:
                rank, connector = serving[(sequence + attempt) % len(serving)]
                attempt += 1
                if self._away:
                    self._count_takeover(rank)
                if sent:
                    self._tell(Event.REPEAT, rank, layer=layer, sequence=sequence)
                sent = True
                limit = min(now + self._hop_timeout_s, answer_end, self._ends_s)
                try:
                    return connector.hop(
                        hidden, layer, micro_batch, sequence=sequence, step=self._step, deadline_s=limit, out=out
                    )
                except PeerLost as error:
                    self._lose(rank, connector, str(error))
            self._closed.wait(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise self._closed_error()

    def _give_up(self, layer: int, sequence: int, waited_s: float) -> NoFfnServer:
        error = NoFfnServer(
            f"hop of layer {layer}, sequence {sequence}: no FFN server answered within {waited_s:.1f} s (servers "
            f"{', '.join(f'ffn{rank}' for rank in (*self._home, *self._others))}); last: {self._last_error}; start one "
            f"again, or raise recovery_timeout_s"
        )
        self._given_up = True
        self._refresh()
        if self._page is not None:
            self._page.count(Event.GIVEN_UP, str(error))
        emit(log, Event.GIVEN_UP, role="attention", rank=self._rank, why=error)
        return error

    def _find(self, end: float) -> None:
        """Try each server that isn't connected once, home servers first, until one serves."""
        for rank in (*self._home, *self._others):
            now = time.monotonic()
            # ``tend`` may be about to connect; it takes no longer than one greeting.
            if now >= end or self._closed.is_set() or not self._dial_lock.acquire(timeout=end - now):
                return
            try:
                if rank not in self._connections:
                    self._try_to_dial(rank, min(end, time.monotonic() + self._patience_of(rank)))
            finally:
                self._dial_lock.release()
            if self._serving:
                return

    # Connections

    def tend(self) -> None:
        """Look after the connections, twice a second: signs of life, losses, and ways back. Raises nothing of a peer's.

        It takes as long as one greeting, at most ``TEND_GREETING_S`` seconds, and a hop that needs a connection waits
        no longer than that for it.
        """
        for _, connector in self._look():
            connector.ping(self._hop_timeout_s)
        # Until all are ready, the start greets them itself: a mismatch is an error then, and none later.
        if not self._ready or self._closed.is_set():
            return
        wanted = self._home if self._serving else (*self._home, *self._others)
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
            if time.monotonic() - now > QUICK_S:
                break  # one that doesn't answer is enough for this time
        self._come_home()

    def close(self) -> None:
        """Say goodbye to all servers; a waiting hop ends with PeerLost. Closing twice is fine."""
        self._closed.set()
        with self._state_lock:
            connectors = [*self._connections.values(), *([self._dialing] if self._dialing is not None else [])]
            self._connections = {}
            self._refresh()
        for connector in connectors:
            connector.close()

    def _look(self) -> list[tuple[int, AttentionConnector]]:
        """The connections that stand; those that don't are given up, and servers that have their weights now serve."""
        standing = []
        for rank, connector in list(self._connections.items()):
            if connector.peer_alive():
                standing.append((rank, connector))
            else:
                self._lose(rank, connector, "the connection has ended")
        self._refresh()
        return standing

    def _come_home(self) -> None:
        """Close the connections to other blocks' servers once a home server serves."""
        with self._state_lock:
            away = [] if self._away or not self._serving else [r for r in self._connections if r not in self._home]
        # A hop may still be on its way over one of them.
        if away and self._hop_lock.acquire(timeout=0.1):
            try:
                with self._state_lock:
                    connectors = [self._connections.pop(rank) for rank in away if rank in self._connections]
                    self._lost.difference_update(away)
                    self._refresh()
                for connector in connectors:
                    connector.close()
            finally:
                self._hop_lock.release()
            log.info("attention rank %d: hops go to the home servers again", self._rank)

    def _dial(self, rank: int, deadline_s: float) -> None:
        """One try to connect to a server. Raises what ``AttentionConnector.connect`` raises."""
        greeting = self._greeting
        assert greeting is not None
        try:
            connector = self._make(rank)
        except OSError as error:
            raise Unreachable(f"no connection to ffn{rank} can be made here: {error.strerror}") from error
        started = time.monotonic()
        try:
            with self._state_lock:
                if self._closed.is_set():
                    raise self._closed_error()
                self._dialing = connector
            theirs = connector.connect(greeting, deadline_s)
            if theirs.rank != rank:
                mismatch = Mismatch("rank", str(rank), str(theirs.rank))
                raise GreetingMismatch(f"the FFN server at {connector.where} is another one: {mismatch}", [mismatch])
            with self._state_lock:
                if self._closed.is_set():
                    raise self._closed_error()
                self._connections[rank] = connector
        except BaseException as error:
            connector.close()
            now = time.monotonic()
            patience = self._patience_of(rank)
            if isinstance(error, Unreachable) and now - started > 0.9 * min(patience, TEND_GREETING_S):
                self._patience[rank] = min(2 * patience, LONGEST_GREETING_S)
                self._not_before[rank] = now + patience
            self._last_error = str(error)
            raise
        finally:
            self._dialing = None
        self._patience.pop(rank, None)
        self._not_before.pop(rank, None)
        if rank in self._lost:
            self._lost.discard(rank)
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

    def _lose(self, rank: int, connector: AttentionConnector, why: str) -> None:
        with self._state_lock:
            if self._connections.get(rank) is not connector:
                return  # another thread was first, or the route is closed
            del self._connections[rank]
            self._lost.add(rank)
            self._last_error = why
            if self._page is not None:  # before the page says that there is no server
                self._page.count(Event.PEER_LOST, why)
            self._refresh()
        connector.close()
        emit(log, Event.PEER_LOST, role="attention", rank=self._rank, peer=f"ffn{rank}", why=why)

    def _refresh(self) -> None:
        """Which servers get hops from now on, and what the page says about it."""
        with self._state_lock:
            serving = {rank: connector for rank, connector in self._connections.items() if connector.serving}
            home = tuple((rank, serving[rank]) for rank in self._home if rank in serving)
            self._away = bool(serving) and not home
            self._serving = home or tuple((rank, serving[rank]) for rank in self._others if rank in serving)
            if home:
                self._took_over = None
            if self._serving:
                self._has_served = True
                self._given_up = False
                state = PeerState.CONNECTED
            elif self._given_up:
                state = PeerState.GIVEN_UP
            else:
                state = PeerState.LOST if self._has_served else PeerState.WAITING
            if self._page is not None:
                self._page.set_peers(len(self._connections))
                self._page.set_peer_state(PeerState.NONE if self._closed.is_set() else state)

    def _count_takeover(self, rank: int) -> None:
        if self._page is not None:
            self._page.count(Event.TAKEOVER)
        if self._took_over != rank:
            self._took_over = rank
            emit(log, Event.TAKEOVER, role="attention", rank=self._rank, peer=f"ffn{rank}")

    def _tell(
        self,
        event: Event,
        rank: int,
        *,
        text: str = "",
        why: object = None,
        layer: int | None = None,
        sequence: int | None = None,
    ) -> None:
        if self._page is not None:
            self._page.count(event, text)
        emit(log, event, role="attention", rank=self._rank, peer=f"ffn{rank}", layer=layer, sequence=sequence, why=why)

    def _closed_error(self) -> PeerLost:
        return PeerLost("this route to the FFN servers was closed")
