"""The attention worker's look at its peers, and at its server, while no hop is on its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from afdpatch.runtime.owner import Owner, OwnerEnded
from afdpatch.runtime.status import StatusPage

if TYPE_CHECKING:
    from afdpatch.runtime.route import Route

log = logging.getLogger(__name__)


class PeerWatch:
    """A thread that twice a second tends the route, gives the heartbeat, and looks whether the server still lives.

    An attention server without requests sends no hops, so nothing else would notice that its peer has gone. A worker
    that hangs in a hop is not this thread's business: every hop has a deadline.

    Args:
        route: its ``tend`` is called, and ``peers`` written to the page; None for a worker that sends no hops itself.
        page: the worker's status page.
        period_s: time between two looks in seconds.
        on_orphaned: called in the thread, which ends then, when the server's first process has ended.
    """

    def __init__(
        self,
        route: Route | None,
        page: StatusPage,
        *,
        period_s: float = 0.5,
        on_orphaned: Callable[[OwnerEnded], None] | None = None,
    ) -> None:
        self._route = route
        self._page = page
        self._period_s = period_s
        self._on_orphaned = on_orphaned
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
        owner = Owner(self._page)
        try:
            while True:
                owner.check()
                if self._route is not None:
                    self._route.end_by(self._page.ends_by_s)
                    self._route.tend()
                self._page.beat()
                if self._stop.wait(self._period_s):
                    return
        except OwnerEnded as error:
            log.error("%s", error)
            self._page.fail(str(error))
            if self._on_orphaned is not None:
                self._on_orphaned(error)
        except Exception as error:  # the page must not look alive when nobody writes it any more
            log.exception("the peer watch ended")
            self._page.fail(f"the peer watch ended: {type(error).__name__}: {error}")
        finally:
            owner.close()
