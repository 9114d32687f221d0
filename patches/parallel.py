"""Parallel seam: which worker of a server has which rank, and how the workers of a tensor-parallel group share hops."""

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from afdpatch.runtime.config import AfdConfig, ConfigError
from afdpatch.runtime.connectors.base import ConnectorError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator

# ---- ranks ----------------------------------------------------------------------------------------------------------


def workers_of(parallel: "ParallelConfig") -> int:
    """How many workers a server has: data parallel x tensor parallel."""
    return parallel.data_parallel_size * parallel.tensor_parallel_size


def place_of(parallel: "ParallelConfig", tp_rank: int) -> int:
    """Which of its server's workers one is: 0 to `workers_of` - 1, tensor-parallel ranks side by side."""
    return parallel.data_parallel_index * parallel.tensor_parallel_size + tp_rank


def check_ranks(afd: AfdConfig, parallel: "ParallelConfig") -> None:
    """The server's workers must fit into what both roles were told of ranks.

    Raises:
        ConfigError: more workers than there are ranks from `rank` on, or an FFN server of another size.
    """
    dp, tp = parallel.data_parallel_size, parallel.tensor_parallel_size
    key = f"num_{afd.role}_ranks"
    if afd.role == "ffn" and (tp != afd.ffn_tp or afd.rank not in afd.ffn_servers):
        servers = ", ".join(map(str, afd.ffn_servers))
        raise ConfigError(
            "connector_extra_config.ffn_tp",
            f"{afd.ffn_tp} for an FFN server of rank {afd.rank} with --tensor-parallel-size {tp}",
            f"both sizes must be equal, on all servers, and an FFN server's rank one of {servers}",
        )
    if afd.rank + dp * tp > afd.num_ranks:
        raise ConfigError(
            key,
            f"{afd.num_ranks} for a server of {dp * tp} workers (data parallel {dp} x tensor parallel {tp}) "
            f"from rank {afd.rank} on",
            f"needed: at least {afd.rank + dp * tp}, on all servers, as it counts the workers of all {afd.role} servers",
        )


# ---- data parallelism -----------------------------------------------------------------------------------------------

_NO_EXPERTS = "afd_computes_no_experts"


def set_computes_experts(model: "ModelConfig", computes: bool) -> None:
    """Whether `ModelConfig.is_moe` may be true of this configuration, here and where it is pickled to."""
    setattr(model, _NO_EXPERTS, not computes)


def is_moe(original: Callable[..., bool]) -> Callable[..., bool]:
    """Around the getter of `ModelConfig.is_moe`: an attention server's data-parallel ranks compute no experts.

    vLLM's ranks of a MoE model go in lockstep, since their experts are shared; those of a dense model don't wait for
    each other.
    """

    @functools.wraps(original)
    def wrapper(self: "ModelConfig") -> bool:
        return not getattr(self, _NO_EXPERTS, False) and original(self)

    return wrapper


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def shared_hop(group: "GroupCoordinator", hop: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The group's first rank does the hop for all, which have the same hidden states; all get its result.

    Args:
        group: the worker's tensor-parallel group.
        hop: gives a tensor [rows, hidden]; called on the first rank only.
        like: the hidden states [rows, hidden].

    Raises:
        HopLost: on the other ranks, when `hop` failed on the first, which raises its own error: the step ends on all.
    """
    rows = like.shape[0]
    # A row more than the result says whether there is one: one broadcast, not two.
    shared = like.new_zeros((rows + 1, like.shape[1]))
    if group.rank_in_group == 0:
        try:
            shared[:rows] = hop()
            shared[rows] = 1
        finally:
            group.broadcast(shared)
    else:
        group.broadcast(shared)
        if shared[rows, 0] != 1:
            raise HopLost("the hop failed on the first rank of the tensor-parallel group, whose log says why")
    return shared[:rows]


class HopLost(ConnectorError):
    """A hop that another rank did for this one failed."""


_NOTHING, _COMPUTE, _STOP = 0, 1, 2
KEEP_ALIVE_S = 1.0
"""How often the first rank of an idle FFN server gives the others a sign of life, in seconds."""
Compute = Callable[[int, torch.Tensor], torch.Tensor]


class FfnGroup:
    """The workers of a tensor-parallel FFN server: the first serves hops, the others compute their share of each.

    Every wait for another rank is for the group's next message, and there is one at least every `KEEP_ALIVE_S`. A rank
    that ends, ends the group: what waits for it fails, and `die` is called.

    Args:
        group: the worker's tensor-parallel group.
        compute: one layer's FFN, all ranks at the same time: (layer, [rows, hidden]) -> the same shape.
        hidden, dtype: of the hidden states.
        beat: called after each message.
        die: called with what makes this worker useless.
    """

    def __init__(
        self,
        group: "GroupCoordinator",
        compute: Compute,
        hidden: int,
        dtype: torch.dtype,
        beat: Callable[[], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self._group, self._compute, self._hidden, self._dtype = group, compute, hidden, dtype
        self._beat, self._die = beat, die
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        run = self._keep_alive if group.rank_in_group == 0 else self._follow
        self._thread = threading.Thread(target=self._run, args=(run,), name="afd-ffn-group", daemon=True)

    def start(self) -> None:
        """From now on the ranks speak to each other; all start at about the same time."""
        self._thread.start()

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """On the first rank: one layer's FFN, computed by all. A failure ends the group, since ranks may differ."""
        try:
            with self._lock:
                self._say(_COMPUTE, layer, hidden_states.shape[0])
                self._group.broadcast(hidden_states)
                return self._compute(layer, hidden_states)
        except Exception as error:
            self._fail(error)
            raise

    def stop(self, timeout_s: float) -> None:
        """End the thread; the first rank ends those of the others."""
        self._stopping.set()
        if not self._thread.is_alive():
            return
        if self._group.rank_in_group == 0 and self._lock.acquire(timeout=timeout_s):
            try:
                self._say(_STOP)
            except RuntimeError:
                pass  # they have ended already
            finally:
                self._lock.release()
        self._thread.join(timeout_s)

    def _say(self, *words: int) -> None:
        message = torch.zeros(3, dtype=torch.int64)
        message[: len(words)] = torch.tensor(words)
        self._group.broadcast(message)

    def _keep_alive(self) -> None:
        while not self._stopping.wait(KEEP_ALIVE_S):
            with self._lock:
                if not self._stopping.is_set():
                    self._say(_NOTHING)

    def _follow(self) -> None:
        message = torch.zeros(3, dtype=torch.int64)
        while True:
            self._group.broadcast(message)
            what, layer, rows = message.tolist()
            if what == _STOP:
                return
            if what == _COMPUTE:
                hidden_states = torch.empty(rows, self._hidden, dtype=self._dtype)
                self._group.broadcast(hidden_states)
                self._compute(layer, hidden_states)
            self._beat()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                run()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """At the end of a server its workers end one after the other: only what isn't that is a failure."""
        if not self._stopping.wait(2 * KEEP_ALIVE_S):
            self._die(error)
