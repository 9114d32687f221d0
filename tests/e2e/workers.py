"""The real FFN worker and the real scheduler with switches: zeros for each FFN, a lost patch, a fault, a kept cache."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from afdpatch.patches.attest import sign
from afdpatch.patches.scheduler import AfdScheduler
from afdpatch.patches.worker_cpu import FFNWorker
from afdpatch.runtime.connectors.base import FfnConnector
from afdpatch.runtime.status import StatusPage
from tests.e2e.recorder import PARAMETERS, record_parameters
from tests.e2e.servers import KEEP_GARBAGE

record_parameters()
FAULT = "AFDPATCH_TEST_FAULT"
"""`greet 9`: this worker sends itself signal 9 within its first greeting, `load 9`: once its weights are loaded,
`hop N 9`: at its N-th hop."""


class SwitchableFFNWorker(FFNWorker):
    """Negative control: `zero_ffn(True)` makes every FFN answer zeros from then on."""

    zeroed = False
    kept: Any = None
    left = 0
    aim = (0, 0)
    death: tuple[int, int, int] | None = None

    def make_connector(self, page: StatusPage) -> FfnConnector:
        """The connector, and the fault in its first greeting that the environment asks for."""
        connector: Any = super().make_connector(page)
        words = os.environ.get(FAULT, "").split()
        if words[:1] == ["greet"]:
            greet = connector._greet

            def strike(*pending: Any) -> Any:
                connector._greet = greet
                os.kill(os.getpid(), int(words[1]))
                return greet(*pending)

            connector._greet = strike
        made: FfnConnector = connector
        return made

    def load_model(self, **kwargs: Any) -> None:
        """Load, and then the fault that the environment asks for."""
        super().load_model(**kwargs)
        words = os.environ.get(FAULT, "").split()
        if words[:1] == ["load"]:
            os.kill(os.getpid(), int(words[1]))
        elif words[:1] == ["hop"]:
            self.signal_at(int(words[1]), os.getpid(), int(words[2]))

    def zero_ffn(self, on: bool) -> None:
        """Worker RPC: zeros instead of the FFN, or the FFN again."""
        self.zeroed = on

    def signal_at(self, hops: int, pid: int, number: int) -> None:
        """Worker RPC: when the `hops`-th hop from now on is to be computed, send a signal to a process."""
        self.left, self.aim = hops, (pid, number)

    def lose_a_patch(self, on: bool) -> None:
        """Worker RPC: somebody takes a patch away (or puts it back), and the worker attests again."""
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        if on:
            type(self).kept = BaseModelLoader.create_model
        BaseModelLoader.create_model = type(self).kept.__wrapped__ if on else type(self).kept
        sign()

    def own_parameters(self) -> dict[str, int]:
        """Worker RPC: name -> bytes of this role's parameters."""
        return PARAMETERS

    def rows_are_alike(self, rows: int) -> bool:
        """Worker RPC, while no hop comes: whether a row gets the same bits alone and beside others, in every layer."""
        model = self.vllm_config.model_config
        for layer in self.ffns:
            generator = torch.Generator().manual_seed(layer)
            batch = torch.randn(rows, model.get_hidden_size(), generator=generator).to(model.dtype)
            with torch.inference_mode():
                whole = super().compute(layer, batch.clone()).clone()
                alone = [super(SwitchableFFNWorker, self).compute(layer, row.clone()) for row in batch.split(1)]
            if not torch.equal(whole, torch.cat(alone)):
                return False
        return True

    def seconds_of(self, ranks: int, rows: int, times: int) -> tuple[list[float], list[float]]:
        """Worker RPC, while no hop comes: what a layer's batch of `ranks` hops takes, and its hops one by one."""
        model = self.vllm_config.model_config
        hops = torch.randn(ranks * rows, model.get_hidden_size()).to(model.dtype).split(rows)
        together, apart = [], []
        with torch.inference_mode():
            for _, layer in zip(range(times), itertools.cycle(self.ffns), strict=False):
                begin = time.perf_counter()
                super().compute(layer, torch.cat(hops))
                middle = time.perf_counter()
                for hop in hops:
                    super().compute(layer, hop.clone())
                together.append(middle - begin)
                apart.append(time.perf_counter() - middle)
        return together, apart

    def die_at(self, layer: int, rows: int, times: int) -> None:
        """Worker RPC: `kill -9` of this worker within its next `times`-th hop of a layer with at least so many rows."""
        self.death = layer, rows, times

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN, or zeros, or a fault."""
        if self.left:
            self.left -= 1
            if not self.left:
                os.kill(*self.aim)
        if self.death is not None and layer == self.death[0] and hidden_states.shape[0] >= self.death[1]:
            self.death = *self.death[:2], self.death[2] - 1
            if self.death[2] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        result: Any = super().compute(layer, hidden_states)
        return torch.zeros_like(result) if self.zeroed else result


class SwitchableScheduler(AfdScheduler):
    """Negative control: while a file exists, nothing leaves the prefix cache."""

    def _evict(self, computed: dict[str, int]) -> None:
        if not Path(os.environ[KEEP_GARBAGE]).exists():
            super()._evict(computed)
