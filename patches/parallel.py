"""Parallel seam: which worker of a server has which rank, and how the workers of a tensor-parallel group share hops."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
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
            f"needed: at least {afd.rank + dp * tp}, on all servers: it counts the workers of all {afd.role} servers",
        )


GLOO_TIMEOUT_S = 1800
"""How long a rank waits for the others of its group where vLLM wasn't told, in seconds: PyTorch's default."""


def check_patience(afd: AfdConfig, parallel: "ParallelConfig") -> None:
    """The ranks of an attention server's group must wait for their first one longer than it waits for an FFN server.

    Raises:
        ConfigError: a timeout of vLLM's groups is too short for AFD's.
    """
    if afd.role != "attention" or parallel.tensor_parallel_size == 1:
        return
    key = max(("connect_timeout_s", "recovery_timeout_s"), key=lambda name: float(getattr(afd, name)))
    longest: float = getattr(afd, key)
    for name in ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"):
        given: int | None = getattr(parallel, name)
        if longest >= (given or GLOO_TIMEOUT_S):
            found = f"{given}" if given else f"none, which is {GLOO_TIMEOUT_S},"
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                f"{found} with --tensor-parallel-size {parallel.tensor_parallel_size} and {key} {longest:g}",
                f"needed: more than {longest:g} s, since the other ranks wait while the first one waits for an FFN "
                f"server; raise it, or lower connector_extra_config.{key}",
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


def shared_hop(group: "GroupCoordinator", hop: Callable[[], torch.Tensor] | None, like: torch.Tensor) -> torch.Tensor:
    """The group's first rank does the hop for all, which have the same hidden states; all get its result.

    Args:
        group: the worker's tensor-parallel group.
        hop: on the first rank, gives a tensor [rows, hidden]; None on the others.
        like: the hidden states [rows, hidden].

    Raises:
        HopLost: on the other ranks, when `hop` failed on the first, which raises its own error: the step ends on all.
    """
    rows = like.shape[0]
    # A row more than the result says whether there is one: one broadcast, not two.
    shared = like.new_zeros((rows + 1, like.shape[1]))
    if hop is not None:
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
END_S = 2.0
"""At a server's end its workers end one after the other: how long one whose group broke waits for its own end."""
Compute = Callable[[int, torch.Tensor], torch.Tensor]


class FfnGroup:
    """The workers of a tensor-parallel FFN server: the first serves hops, the others compute their share of each.

    On the first rank, `compute` and `idle` are called by the thread that serves hops; one of them at least twice a
    second, so that no rank waits longer for the next message. On the others a thread of this object follows. A rank
    that ends, ends the group: what waits for it fails, and `die` is called.

    Args:
        group: the worker's tensor-parallel group.
        compute: one layer's FFN, all ranks at the same time: (layer, [rows, hidden]) -> the same shape.
        hidden: size of the hidden states.
        dtype: their type.
        beat: called after each message, where this rank follows.
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
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on a rank that isn't the first follows it."""
        if self._group.rank_in_group != 0:
            self._thread = threading.Thread(target=self._run, name="afd-ffn-group", daemon=True)
            self._thread.start()

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """One layer's FFN, computed by all ranks. A failure ends the group, whose ranks may differ after it."""
        with self._or_die():
            self._say(_COMPUTE, layer, hidden_states.shape[0])
            self._group.broadcast(hidden_states)
            return self._compute(layer, hidden_states)

    def idle(self) -> None:
        """A sign of life for the others."""
        with self._or_die():
            self._say(_NOTHING)

    def stop(self, timeout_s: float) -> None:
        """On the first rank, once its hops are done: end the others' threads. On the others: wait for that."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        elif self._group.rank_in_group == 0:
            with contextlib.suppress(RuntimeError):  # they have ended already
                self._say(_STOP)

    def _say(self, what: int, layer: int = 0, rows: int = 0) -> None:
        self._group.broadcast(torch.tensor([what, layer, rows], dtype=torch.int64))

    def _run(self) -> None:
        with torch.inference_mode(), self._or_die():
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

    @contextlib.contextmanager
    def _or_die(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._ending.wait(END_S):
                self._die(error)
            raise
