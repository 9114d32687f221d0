"""Model seam: each role reads its own tensors from a checkpoint and leaves the other's in the file."""

import functools
from collections.abc import Callable


def should_skip_weight(original: Callable[..., bool]) -> Callable[..., bool]:
    """Around `should_skip_weight`, which vLLM asks before it reads a tensor: the other role's are skipped too."""
    from vllm.config import get_current_vllm_config

    from afdpatch.patches.settings import settings_of

    @functools.wraps(original)
    def wrapper(weight_name: str, local_expert_ids: "set[int] | None") -> bool:
        settings = settings_of(get_current_vllm_config())
        if settings is None or settings.link is None:
            return original(weight_name, local_expert_ids)
        skip = settings.row.owner(weight_name) not in (settings.role, "both") or original(weight_name, local_expert_ids)
        settings.link.count_tensor(read=not skip)
        return skip

    return wrapper
