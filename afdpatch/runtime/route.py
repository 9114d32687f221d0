"""An attention rank's hops: to which FFN server one goes, and what happens when that one is lost.

Hops go in turn to the serving servers of the rank's own block, its *home* servers (`Peers` has the connections). A hop
whose server is lost is sent again under its own sequence number, over another connection: to another home server, to
one that came back, or to a server of another block (a takeover), until its deadline. An answer counts only on the
connection that its hop went over, and that connection is closed when the hop is given up there: no late answer reaches
a newer hop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from torch import Tensor

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import AttentionConnector, FfnError, NoFfnServer, PeerLost
from afdpatch.runtime.events import Event, emit
from afdpatch.runtime.peers import FIRST_PAUSE_S, LONGEST_PAUSE_S, Peers
from afdpatch.runtime.protocol import Greeting, Layout
from afdpatch.runtime.status import StatusPage

QUICK_S = 0.5
"""How long a hop looks for a server where there is none and an earlier hop has been given up."""
LAST_HOP_S = 1.0
"""How long a hop may still take once this server's hops must have ended."""
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
        self._rank = rank
        self._page = page
        self._hop_timeout_s = config.hop_timeout_s
        self._recovery_timeout_s = config.recovery_timeout_s
        self._peers = Peers(config, rank, page, make_connector, group=group)
        self._hop_lock = threading.Lock()  # held over a whole hop; nothing else waits for it without a limit
        self._sequence = 0
        self._row_bytes = 0
        self._step = 0
        self._step_end = math.inf
        self._patience_s = config.recovery_timeout_s
        self._ends_s = math.inf
        self._began_s = math.inf  # of the hop under way

    # Connections

    def connect(self, greeting: Greeting, deadline_s: float | None = None) -> None:
        """Greet all home servers. Raises what `Peers.connect` raises."""
        self._row_bytes = Layout.of(greeting).row_bytes
        self._peers.connect(greeting, deadline_s)

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Wait until all home servers have their weights. Raises what `Peers.wait_ready` raises."""
        self._peers.wait_ready(deadline_s)

    def tend(self) -> None:
        """To be called twice a second: `Peers.tend`, which leaves other blocks' servers between two hops only."""
        self._peers.tend(self._hop_lock)

    def close(self) -> None:
        """Say goodbye to all servers; a waiting hop ends with PeerLost. Closing twice is fine."""
        self._peers.close()

    # Hops

    def begin_step(self, deadline_s: float | None = None, patience_s: float | None = None) -> None:
        """A forward begins: its hops carry the next step number.

        Args:
            deadline_s: none of them waits beyond it.
            patience_s: how long each of them is tried (default: ``recovery_timeout_s``).
        """
        self._step += 1
        self._step_end = math.inf if deadline_s is None else deadline_s
        self._patience_s = self._recovery_timeout_s if patience_s is None else patience_s

    def end_by(self, deadline_s: float) -> None:
        """This server ends: past the deadline no hop waits for a server, and one that waits for an answer is let go.

        To be called again and again while the deadline is known.
        """
        self._ends_s = deadline_s
        now = time.monotonic()
        if now > deadline_s and now - self._began_s > LAST_HOP_S:
            self._peers.lose_all("no answer before this server's end")

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
            serving = self._peers.serving
            try:
                if serving:
                    rank, connector = serving[sequence % len(serving)]
                    if rank not in self._peers.home:
                        self._peers.count_takeover(rank)
                    limit = min(began_ns / 1e9 + self._hop_timeout_s, self._step_end)
                    try:
                        result = connector.hop(
                            hidden, layer, micro_batch, sequence=sequence, step=self._step, deadline_s=limit, out=out
                        )
                    except PeerLost as error:
                        self._peers.lose(connector, str(error))
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
        peers = self._peers
        if peers.greeting is None:
            raise PeerLost("a hop before connect()")
        answer_end = end = min(began_s + self._patience_s, self._step_end)
        if peers.given_up:
            end = min(end, time.monotonic() + QUICK_S)  # to find a server; one that is there gets its time to answer
        pause = FIRST_PAUSE_S
        attempt = 0
        while not peers.closed.is_set():
            end = min(end, self._ends_s)
            peers.find(end)
            serving = peers.serving
            now = time.monotonic()
            if now >= end:
                raise self._give_up(layer, sequence, now - began_s)
            if serving:
                rank, connector = serving[(sequence + attempt) % len(serving)]
                attempt += 1
                if rank not in peers.home:
                    peers.count_takeover(rank)
                if sent:
                    self._tell_repeat(rank, layer, sequence)
                sent = True
                limit = min(now + self._hop_timeout_s, answer_end, self._ends_s)
                try:
                    return connector.hop(
                        hidden, layer, micro_batch, sequence=sequence, step=self._step, deadline_s=limit, out=out
                    )
                except PeerLost as error:
                    peers.lose(connector, str(error))
            peers.closed.wait(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise peers.closed_error()

    def _tell_repeat(self, rank: int, layer: int, sequence: int) -> None:
        if self._page is not None:
            self._page.count(Event.REPEAT)
        emit(log, Event.REPEAT, role="attention", rank=self._rank, peer=f"ffn{rank}", layer=layer, sequence=sequence)

    def _give_up(self, layer: int, sequence: int, waited_s: float) -> NoFfnServer:
        error = NoFfnServer(
            f"hop of layer {layer}, sequence {sequence}: no FFN server answered within {waited_s:.1f} s (servers "
            f"{', '.join(f'ffn{rank}' for rank in self._peers.ranks)}); last: {self._peers.last_error}; start one "
            f"again, or raise recovery_timeout_s"
        )
        self._peers.give_up()
        if self._page is not None:
            self._page.count(Event.GIVEN_UP, str(error))
        emit(log, Event.GIVEN_UP, role="attention", rank=self._rank, why=error)
        return error
