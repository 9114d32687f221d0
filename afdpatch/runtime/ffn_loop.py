"""The FFN server's loop: greet, receive hops, compute, answer, drain, and give a sign of life."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from afdpatch.runtime.connectors.base import FfnConnector, IncomingHop, batches
from afdpatch.runtime.events import Event, emit
from afdpatch.runtime.owner import Owner
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.snapshot import Peer
from afdpatch.runtime.status import StatusPage

_IDLE_S = 0.25
_IDLE_NS = int(_IDLE_S * 1e9)
log = logging.getLogger(__name__)

Compute = Callable[[int, Tensor], Tensor]
"""(layer, hidden [rows, hidden_size]) -> tensor of the same shape and dtype. The input is scratch: it may be
overwritten, and is valid only until the call returns."""


class FfnLoop:
    """Serves hops in a thread of its own, in order of arrival; hops of one layer that wait are computed together.

    The heartbeat is given by the same thread, between hops and at least every half second: when ``compute`` hangs, it
    stops. The thread also does what the page's ``drain_requested`` asks, and dies when the server's first process has
    ended.

    Args:
        connector: not listening yet; the loop owns it from ``start`` on.
        compute: one layer's FFN.
        page: the worker's status page.
        greeting: this server's, of role ``ffn``.
        merge: whether to compute hops of one layer together.
        wrap: makes a context manager in which the whole thread runs (``torch.inference_mode`` and the like).
        on_idle: called in the thread while no hop comes, at least every half second, from ``serve`` on.
        on_death: called in the thread with the exception that ended the loop, after the page has been marked failed.
    """

    def __init__(
        self,
        connector: FfnConnector,
        compute: Compute,
        page: StatusPage,
        greeting: Greeting,
        *,
        merge: bool = True,
        wrap: Callable[[], AbstractContextManager[object]] | None = None,
        on_idle: Callable[[], None] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._connector = connector
        self._compute = compute
        self._page = page
        self._greeting = greeting
        self._merge = merge
        self._wrap = wrap or contextlib.nullcontext
        self._on_idle = on_idle
        self._on_death = on_death
        self._stopping = False
        self._serving = False
        self._draining = False
        self._drained = False
        self._steps: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, and start the thread: peers are greeted from now on, their hops wait for ``serve``.

        Raises:
            AddressInUse: another server has the address; nothing was started.
        """
        if self._thread is not None:
            raise RuntimeError("FfnLoop.start: already started; expected one start")
        self._connector.listen(self._greeting)
        self._page.beat()
        self._thread = threading.Thread(target=self._run, name="afd-ffn-loop", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """The weights are there: answer hops from now on."""
        self._connector.set_serving()
        self._serving = True

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Finish the current hop, say goodbye to the peers, end the thread.

        Returns:
            Whether the thread ended in time; False means that ``compute`` hangs.
        """
        self._stopping = True
        if self._thread is None:
            return True
        if self._thread.is_alive():
            self._connector.wake()
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._wrap():
                try:
                    self._loop()
                finally:
                    self._connector.close()
        except BaseException as error:
            text = f"the FFN loop ended: {type(error).__name__}: {error}"
            log.exception("%s", text)
            self._page.fail(text)
            if self._on_death is not None:
                self._on_death(error)

    def _loop(self) -> None:
        page, connector, now = self._page, self._connector, time.monotonic_ns
        receive = connector.receive
        owner = Owner(page)
        looked = free_since = now()
        try:
            while not self._stopping:
                hops = receive(_IDLE_S)
                started = now()
                page.beat()
                page.count_wait(started - free_since)
                page.set_queue(connector.waiting)
                if hops:
                    self._answer(hops, started)
                    del hops  # they hold views of the peers' memory, which must be free to go
                elif self._serving and self._on_idle is not None:
                    self._on_idle()
                if started - looked >= _IDLE_NS:
                    looked = started
                    owner.check()
                    page.name_peers([Peer(peer.rank, peer.pid, peer.heard_ns) for peer in connector.peers()])
                if self._draining or page.drain_requested:
                    self._drain(page.drain_requested)
                free_since = now()
        finally:
            owner.close()

    def _answer(self, hops: Sequence[IncomingHop], started_ns: int) -> None:
        """Compute and answer hops of one layer that were received at ``started_ns``."""
        if len(hops) == 1 or not self._merge:
            for hop in hops:
                self._answer_one(hop, started_ns)
            return
        for together in batches(hops):
            if len(together) == 1 or not self._answer_together(together, started_ns):
                # One hop that can't be computed must not fail the others.
                for hop in together:
                    self._answer_one(hop, started_ns)

    def _answer_one(self, hop: IncomingHop, started_ns: int) -> None:
        page, header = self._page, hop.header
        begun = time.monotonic_ns()
        try:
            result = self._compute(header.layer, hop.hidden)
            computed = time.monotonic_ns()
            self._connector.reply(hop, result)
        except Exception as error:
            self._failed(hop, error)
            return
        page.count_compute(computed - begun)
        self._count(hop, started_ns)

    def _answer_together(self, hops: Sequence[IncomingHop], started_ns: int) -> bool:
        """Whether the hops were computed together; each has its answer then."""
        page, layer = self._page, hops[0].header.layer
        hidden = torch.cat([hop.hidden for hop in hops])
        shape, dtype = hidden.shape, hidden.dtype
        begun = time.monotonic_ns()
        try:
            result = self._compute(layer, hidden)
            if result.shape != shape or result.dtype is not dtype:
                raise ValueError(
                    f"found a result of {list(result.shape)}, {result.dtype}; expected {list(shape)}, {dtype}"
                )
        except Exception as error:
            what = f"layer {layer}, {len(hops)} hops with {shape[0]} rows: computing them together failed"
            log.warning("%s (%s: %s); each is tried alone", what, type(error).__name__, error)
            return False
        page.count_compute(time.monotonic_ns() - begun)
        page.count(Event.MERGED, number=len(hops))
        for hop, part in zip(hops, torch.split(result, [hop.header.rows for hop in hops]), strict=True):
            try:
                self._connector.reply(hop, part)
            except Exception as error:
                self._failed(hop, error)
            else:
                self._count(hop, started_ns)
        return True

    def _count(self, hop: IncomingHop, started_ns: int) -> None:
        header = hop.header
        self._page.count_hop(header.rows, header.nbytes, time.monotonic_ns() - started_ns)
        if self._steps.get(hop.rank) != header.step:
            self._steps[hop.rank] = header.step
            self._page.count_step()

    def _failed(self, hop: IncomingHop, error: Exception) -> None:
        header, why = hop.header, f"{type(error).__name__}: {error}"
        where = {"role": "ffn", "rank": self._greeting.rank, "layer": header.layer, "rows": header.rows}
        emit(log, Event.ERROR, error=error, **where, why=why)
        self._page.count(Event.ERROR, f"layer {header.layer}: {why}")
        self._connector.reply_error(hop, why)

    def _drain(self, wanted: bool) -> None:
        """Follow what was asked, and notice when the last peer has gone."""
        page, rank = self._page, self._greeting.rank
        if wanted and not self._draining:
            self._draining, self._drained = True, False
            page.set_draining(True)
            page.count(Event.DRAINING)
            emit(log, Event.DRAINING, role="ffn", rank=rank, peers=page.peers)
            self._connector.drain()
        elif not wanted:
            self._draining = False
            self._connector.resume()
            page.set_draining(False)
            page.count(Event.RESUMED)
            emit(log, Event.RESUMED, role="ffn", rank=rank)
        elif not self._drained and not page.peers:
            self._drained = True
            page.count(Event.DRAINED)
            emit(log, Event.DRAINED, role="ffn", rank=rank)
