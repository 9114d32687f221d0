"""The roles' workers on CPU; `worker_cls` names them."""

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # must be the first import of vllm's workers

from afdpatch.patches.worker import AttentionRole, FFNRole


class AttentionWorker(AttentionRole, CPUWorker):
    """vLLM's CPU worker as an attention server's."""


class FFNWorker(FFNRole, CPUWorker):
    """vLLM's CPU worker as an FFN server's."""
