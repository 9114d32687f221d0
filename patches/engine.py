"""EngineCore start: the spawned EngineCore has its patches before it does anything."""

import signal
import socket
import threading
import time
from typing import Any

import afdpatch
from afdpatch.patches.attest import sign
from afdpatch.patches.settings import settings_of
from afdpatch.runtime.status import StatusPages

ENTRY = "engine-core.start"
HOP_SHARE = 0.5
"""The part of vLLM's `shutdown_timeout` in which hops may wait for an FFN server; the rest is for the end itself."""


def run_engine_core(*args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any) -> None:
    """In the place of `EngineCoreProc.run_engine_core`, the target of the spawned process.

    It is pickled by its own name, so the child imports afdpatch to find it. The patches are applied here; vLLM's own
    function does the rest. A set that can't be applied ends the child, and with it the server, before weights load.
    """
    settings = settings_of(kwargs["vllm_config"])
    if settings is None:
        # The parent had a server with AFD before this one without: in this process nothing is applied.
        from vllm.v1.engine.core import EngineCoreProc

        EngineCoreProc.run_engine_core(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)
        return
    afdpatch.patchset.apply(role=settings.role, process="engine-core")
    sign()
    if settings.role == "attention":
        end_hops_at_a_signal(HOP_SHARE * kwargs["vllm_config"].shutdown_timeout)
    afdpatch.patchset.original(ENTRY)(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)


def end_hops_at_a_signal(after_s: float) -> None:
    """Once this process is asked to end, the workers' hops wait no longer than `after_s` seconds for an FFN server.

    vLLM's own handler lets requests finish, and one whose step waits in a hop could not before it is killed. Python
    writes each signal that has a handler to a descriptor, whoever installs that handler.
    """
    pages = StatusPages.from_environment()
    assert pages is not None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        asked = False
        while number := reader.recv(1):  # to the end of the process: Python complains where nobody reads
            if number[0] in (signal.SIGTERM, signal.SIGINT) and not asked:
                asked = True
                pages.request_end(time.monotonic() + after_s)

    threading.Thread(target=wait, name="afd-signals", daemon=True).start()
