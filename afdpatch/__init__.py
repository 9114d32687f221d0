"""afdpatch: one model, served by attention servers and FFN servers, both unmodified vLLM.

`import afdpatch` before vllm arms the patches that the manifest calls always-on: they do nothing until a server's
`additional_config` has the key "afd". The rest is applied once the role is known. It imports neither vllm nor torch.
"""

from contextlib import suppress

from afdpatch.registry import PatchError, PatchSet

patchset = PatchSet.load("afdpatch.manifests", "afd")
"""The patches of this process."""


def register() -> None:
    """What vLLM's plug-in hook calls (`afdpatch_plugin`): arms the always-on patches, ours and of declared manifests.

    Raises:
        PatchError: they can't be put in effect in this vLLM. vLLM then doesn't start, since a server that was meant
            to have a role would come up without one; `afdpatch verify` says what doesn't fit.
    """
    from afdpatch.registry.plugins import arm_declared

    patchset.arm()
    arm_declared()


with suppress(PatchError):  # kept by the patch set: `register` raises it again in a process that starts vLLM
    patchset.arm()
