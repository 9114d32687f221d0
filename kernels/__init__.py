"""Device code of the hop between GPUs of one host: `HopBuffers`. Needs torch with CUDA, a GPU of compute capability 9.0
or later and, at first use, nvcc. `nccl` is for several hosts and needs neither. Imports neither vLLM nor other rooms.

`layout` is free of torch; `HopBuffers`, `HopCode`, `HopStatus` and `HopError` are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hop import HopBuffers, HopCode, HopError, HopStatus

__all__ = ["HopBuffers", "HopCode", "HopError", "HopStatus"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import hop

    return getattr(hop, name)
