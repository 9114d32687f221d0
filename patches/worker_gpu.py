"""The roles' workers on CUDA; `worker_cls` names them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.workspace import lock_workspace, unlock_workspace

from afdpatch.patches.features import check_pieces
from afdpatch.patches.scheduler import LostStep
from afdpatch.patches.worker import AttentionRole, FFNRole
from afdpatch.runtime.connectors.base import ConnectorError, FfnConnector
from afdpatch.runtime.connectors.factory import gpu_ffn_connector
from afdpatch.runtime.connectors.ipc_attention import GpuAttentionConnector
from afdpatch.runtime.status import StatusPage
from afdpatch.runtime.step_route import StepRoute

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class AttentionWorker(AttentionRole, Worker):
    """vLLM's CUDA worker as an attention server's. Hops are launches: what a step gave is checked once it is there."""

    make_route = StepRoute
    _step: "tuple[SchedulerOutput, GpuAttentionConnector | None]"

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """vLLM's, and the check of what it returns."""
        # Runner V1 has a seam for this: `afdpatch.patches.runner`.
        counts = self.use_v2_model_runner and scheduler_output.total_num_scheduled_tokens
        with self.link.step() if counts else nullcontext():
            output = super().execute_model(scheduler_output)
        self._step = scheduler_output, self.link.route.under_way
        return self._checked(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's, and the check of what it returns."""
        return self._checked(super().sample_tokens(grammar_output))

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up and capture, and the check of their hops."""
        check_pieces(self.vllm_config)  # vLLM may have changed its mind about graphs since its configuration
        times = super().compile_or_warm_up_model()
        torch.cuda.synchronize()
        self.link.route.check(self.link.route.under_way)
        return times

    def _checked(self, output: Any) -> Any:
        scheduled, connection = self._step
        if output is None or isinstance(output, LostStep) or not scheduled.total_num_scheduled_tokens:
            return output
        checked = CheckedOutput(output, self, scheduled, connection)
        if isinstance(output, AsyncModelRunnerOutput):
            return checked
        result = checked.get_output()
        if isinstance(result, LostStep):
            self._lost = result
        return result


class CheckedOutput(AsyncModelRunnerOutput):
    """A step's output, perhaps not there yet; once it is, its hops are looked at before anybody sees its tokens."""

    def __init__(
        self,
        output: Any,
        worker: AttentionRole,
        scheduled: "SchedulerOutput",
        connection: GpuAttentionConnector | None,
    ) -> None:
        self._output = output
        self._worker = worker
        self._scheduled = scheduled
        self._connection = connection

    def get_output(self) -> Any:
        """vLLM's output; `LostStep` if a hop of this step, or of one behind it, failed: its tokens are worthless."""
        output = self._output
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        try:
            self._worker.link.route.check(self._connection)
        except ConnectorError as error:
            return self._worker.lost(self._scheduled, error)
        return output


class FFNWorker(FFNRole, Worker):
    """vLLM's CUDA worker as an FFN server's."""

    def make_connector(self, page: StatusPage) -> FfnConnector:
        """Steps are computed as they are announced; see `GpuFfnConnector`."""
        return gpu_ffn_connector(self.settings.config, self.link.rank, self.compute, self.freeze, page)

    @contextmanager
    def around_the_loop(self) -> Iterator[None]:
        """The loop's thread: this worker's device and a stream of its own (the default stream can't be captured)."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def freeze(self, frozen: bool) -> None:
        """While there are graphs, vLLM's workspace must not grow: growing frees what they point at."""
        lock_workspace() if frozen else unlock_workspace()

    def compile_or_warm_up_model(self) -> Any:
        """The weights were loaded in another stream than that of the loop."""
        torch.cuda.synchronize()
        return super().compile_or_warm_up_model()
