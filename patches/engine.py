"""EngineCore start: the spawned EngineCore has its patches before it does anything."""

from typing import Any

import afdpatch
from afdpatch.patches.attest import sign
from afdpatch.patches.settings import settings_of

ENTRY = "engine-core.start"


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
    afdpatch.patchset.original(ENTRY)(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)
