"""The FFN server's loop: greet, receive a hop, compute, answer, and give a sign of life."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from afdpatch.runtime.connectors.base import FfnConnector, IncomingHop
from afdpatch.runtime.events import Event
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.status import StatusPage

_IDLE_S = 0.25
log = logging.getLogger(__name__)

Compute = Callable[[int, Tensor], Tensor]
"""(layer, hidden [rows, hidden_size]) -> tensor of the same shape and dtype. The input is scratch: it may be
overwritten, and is valid only until the call returns."""


class FfnLoop:
    """Serves hops in a thread of its own, in order of arrival.

    The heartbeat is given by the same thread, between hops and at least every half second: when ``compute`` hangs, it
    stops.

    Args:
        connector: not listening yet; the loop owns it from ``start`` on.
        compute: one layer's FFN.
        page: the server's status page.
        greeting: this server's, of role ``ffn``.
        wrap: makes a context manager in which the whole thread runs (``torch.inference_mode`` and the like).
        on_death: called in the thread with the exception that ended the loop, after the page has been marked failed.
    """

    def __init__(
        self,
        connector: FfnConnector,
        compute: Compute,
        page: StatusPage,
        greeting: Greeting,
        *,
        wrap: Callable[[], AbstractContextManager[object]] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._connector = connector
        self._compute = compute
        self._page = page
        self._greeting = greeting
        self._wrap = wrap or contextlib.nullcontext
        self._on_death = on_death
        self._stopping = False
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
        receive, beat = self._connector.receive, self._page.beat
        while not self._stopping:
            hop = receive(_IDLE_S)
            beat()
            if hop is not None:
                self._answer(hop)
                del hop  # it holds a view of the peer's memory, which must be free to go

    def _answer(self, hop: IncomingHop) -> None:
        page, header = self._page, hop.header
        started = time.monotonic_ns()
        try:
            result = self._compute(header.layer, hop.hidden)
            computed = time.monotonic_ns()
            self._connector.reply(hop, result)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            log.exception("layer %d, %d rows: the computation failed", header.layer, header.rows)
            page.count(Event.ERROR, f"layer {header.layer}: {text}")
            self._connector.reply_error(hop, text)
            return
        page.count_compute(computed - started)
        page.count_hop(header.rows, header.nbytes, time.monotonic_ns() - started)
        if self._steps.get(hop.peer) != header.step:
            self._steps[hop.peer] = header.step
            page.count_step()
