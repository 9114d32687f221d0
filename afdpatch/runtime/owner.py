"""The server's first process, as its other processes watch it: when it has ended, they have nothing to live for."""

from __future__ import annotations

import logging
import os
import re
import select

from afdpatch.runtime.status import StatusPage

PAGE_PATH = re.compile(r"/proc/(\d+)/fd/\d+")
log = logging.getLogger(__name__)


class OwnerEnded(RuntimeError):
    """The server's first process has ended; a worker that goes on would keep the server's address and its memory."""


class Owner:
    """Looks at the process that made a status page, by a pidfd, which no later process of the same id can replace.

    Args:
        page: of the server; in the process that made it there is nothing to watch.
    """

    def __init__(self, page: StatusPage) -> None:
        named = PAGE_PATH.fullmatch(page.path)
        self.pid = int(named[1]) if named else os.getpid()
        self._fd = -1
        self._gone = False
        self._poll = select.poll()
        if self.pid == os.getpid():
            return
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._gone = True
            return
        except OSError as error:
            log.warning("can't watch the server's first process %d: %s; its end won't be noticed", self.pid, error)
            return
        self._poll.register(self._fd, select.POLLIN)
        try:
            same = page.is_at(page.path)
        except OSError:
            same = False
        # Else the id went to another process before the pidfd held it: only the owner has this page there.
        self._gone = not same

    def check(self) -> None:
        """Return at once while the process lives.

        Raises:
            OwnerEnded.
        """
        if self._gone or (self._fd >= 0 and self._poll.poll(0)):
            self._gone = True
            raise OwnerEnded(
                f"the server's first process {self.pid} has ended; this worker {os.getpid()} ends too, so that the "
                f"server can be started again"
            )

    def close(self) -> None:
        """Stop watching; closing twice is fine."""
        if self._fd >= 0:
            self._poll.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1


def process_space() -> str:
    """Where process ids mean the same: this boot of this kernel, and this namespace of process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
