"""The roles' workers on CUDA; `worker_cls` names them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

from afdpatch.patches.worker import AttentionRole, FFNRole
from afdpatch.runtime.connectors.base import AttentionConnector, FfnConnector
from afdpatch.runtime.connectors.ipc import attention_connector, ffn_connector
from afdpatch.runtime.status import StatusPage


class AttentionWorker(AttentionRole, Worker):
    """vLLM's CUDA worker as an attention server's. Hops are launches: what a step gave is checked once it is there."""

    make_connector = staticmethod(attention_connector)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the check of what it returns."""
        return self._checked(super().execute_model(*args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the check of what it returns."""
        return self._checked(super().sample_tokens(*args, **kwargs))

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up and capture, and the check of their hops."""
        times = super().compile_or_warm_up_model()
        torch.cuda.synchronize()
        self.link.connector.check()
        return times

    def _checked(self, output: Any) -> Any:
        if isinstance(output, AsyncModelRunnerOutput):
            return CheckedOutput(output, self.link.connector)
        if output is not None:
            self.link.connector.check()
        return output


class CheckedOutput(AsyncModelRunnerOutput):
    """A step's output that isn't there yet; once it is, its hops are looked at before anybody sees its tokens."""

    def __init__(self, output: AsyncModelRunnerOutput, connector: AttentionConnector) -> None:
        self._output = output
        self._connector = connector

    def get_output(self) -> Any:
        """vLLM's output.

        Raises:
            PeerLost: a hop of this step (or of one behind it) failed; the tokens are worthless.
        """
        output = self._output.get_output()
        self._connector.check()
        return output


class FFNWorker(FFNRole, Worker):
    """vLLM's CUDA worker as an FFN server's."""

    def make_connector(self, page: StatusPage) -> FfnConnector:
        """Steps are computed as they are announced; see `IpcFfnConnector`."""
        return ffn_connector(self.settings.config, self.rank, self.compute, self.freeze, page)

    @contextmanager
    def around_the_loop(self) -> Iterator[None]:
        """The loop's thread: this worker's device and a stream of its own (the default stream can't be captured)."""
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def freeze(self, frozen: bool) -> None:
        """While there are graphs, vLLM's workspace must not grow: growing frees what they point at."""
        lock_workspace() if frozen else unlock_workspace()

    def compile_or_warm_up_model(self) -> Any:
        """The weights were loaded in another stream than that of the loop."""
        torch.cuda.synchronize()
        return super().compile_or_warm_up_model()
