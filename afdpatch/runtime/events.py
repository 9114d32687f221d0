"""What happens between the two roles: one list of events, counted on the status page and told in the log.

A line of the log is logfmt, so that a person and a machine read the same one:
``AFD event=peer_lost role=attention rank=0 peer=ffn0 why="the FFN server has gone"``.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import threading
import time

MAX_FIELD = 600
"""Characters of a field; a longer one, which may have come from the network, is cut."""
LINES, PERIOD_S = 20, 10.0
"""At most so many lines of one event in so many seconds; the next line says how many were left out (``unlogged``)."""
_BARE = re.compile(r"[\w.:/@%+-]+", re.ASCII)


class Event(enum.Enum):
    """An event: its name in the log and in the metrics (``afd_<name>_total``), and what it means."""

    REPEAT = "hops_repeated", "Hops that were sent again."
    PEER_LOST = "peers_lost", "Connections that were lost."
    PEER_RETURNED = "peers_returned", "Connections that stood again after a loss."
    TAKEOVER = "takeovers", "Hops that went to another FFN server than the home ones."
    GIVEN_UP = "given_up", "Hops that found no FFN server before their deadline."
    REFUSED = "peers_refused", "Connections that were refused."
    DROPPED = "messages_dropped", "Messages that were dropped: garbage, too large, replayed, out of order."
    ERROR = "errors", "Hops that failed."
    MERGED = "hops_merged", "Hops that were computed together with another's."
    DRAINING = "drains", "Times that this server was told to drain."
    DRAINED = "drained", "Times that a draining server had no peers left."
    RESUMED = "resumed", "Times that a drained server took peers again."

    def __init__(self, counter: str, text: str) -> None:
        self.counter = counter
        self.text = text
        self.index = len(type(self).__members__)


_LEVELS = {
    event: logging.WARNING
    for event in (Event.PEER_LOST, Event.TAKEOVER, Event.GIVEN_UP, Event.REFUSED, Event.DROPPED, Event.ERROR)
}
_lock = threading.Lock()
_windows: dict[Event, tuple[float, int]] = {}


def emit(logger: logging.Logger, event: Event, *, error: BaseException | None = None, **fields: object) -> None:
    """Log one line of an event: a warning where somebody waits or was turned away, else information.

    Args:
        logger: one below ``afdpatch``, whose handlers are vLLM's in a worker.
        event: its name in lower case is the field ``event``.
        error: its traceback follows the line.
        fields: in their order; those that are None are left out.
    """
    left_out = _admit(event)
    if left_out is None:
        return
    if left_out:
        fields["unlogged"] = left_out
    told = "".join(f" {key}={logfmt(value)}" for key, value in fields.items() if value is not None)
    logger.log(_LEVELS.get(event, logging.INFO), "AFD event=%s%s", event.name.lower(), told, exc_info=error)


def logfmt(value: object) -> str:
    """A value in one word of ASCII, quoted and escaped where it needs that."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= MAX_FIELD else text[:MAX_FIELD] + "..."
    return text if _BARE.fullmatch(text) else json.dumps(text).replace("\x7f", "\\u007f")


def _admit(event: Event) -> int | None:
    """How many lines of the event were left out before this one, None when this one is left out too."""
    now = time.monotonic()
    with _lock:
        began, lines = _windows.get(event, (now, 0))
        if now - began < PERIOD_S:
            _windows[event] = began, lines + 1
            return 0 if lines < LINES else None
        _windows[event] = now, 1
        return max(0, lines - LINES)
