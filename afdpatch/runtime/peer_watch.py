"""The attention server's look at its peer while no hop is on its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from afdpatch.runtime.connectors.base import AttentionConnector
from afdpatch.runtime.status import StatusPage

log = logging.getLogger(__name__)


class PeerWatch:
    """A thread that writes to the page twice a second whether the FFN server is connected, and the heartbeat.

    An attention server without requests sends no hops, so nothing else would notice that its peer has gone. A worker
    that hangs in a hop is not this thread's business: every hop has a deadline.

    Args:
        connector: asked ``peer_alive``.
        page: the server's status page.
        period_s: time between two looks in seconds.
        on_lost: called once for each loss, in the thread.
    """

    def __init__(
        self,
        connector: AttentionConnector,
        page: StatusPage,
        *,
        period_s: float = 0.5,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._connector = connector
        self._page = page
        self._period_s = period_s
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread ``afd-peer-watch``."""
        if self._thread is not None:
            raise RuntimeError("PeerWatch.start: already started; expected one start")
        self._thread = threading.Thread(target=self._run, name="afd-peer-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread; whether it ended in time."""
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        was_alive = False
        try:
            while True:
                alive = self._connector.peer_alive()
                self._page.set_peers(int(alive))
                if was_alive and not alive:
                    text = "the FFN server has gone; requests fail until this server is started again"
                    log.warning("%s", text)
                    self._page.set_error(text)
                    if self._on_lost is not None:
                        self._on_lost()
                was_alive = alive
                self._page.beat()
                if self._stop.wait(self._period_s):
                    return
        except Exception as error:  # the page must not look alive when nobody writes it any more
            log.exception("the peer watch ended")
            self._page.fail(f"the peer watch ended: {type(error).__name__}: {error}")
