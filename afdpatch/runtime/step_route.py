"""An attention rank's way to its FFN server where hops are launches on a GPU: what is lost is lost by the step.

No host sees a hop, so a lost one can't be sent again alone. A step whose connection is lost is lost as a whole; the
next one waits at its first layer for a server, as a hop of `Route` does, and goes on over the new connection.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import PeerLost
from afdpatch.runtime.connectors.factory import gpu_connectors, gpu_end
from afdpatch.runtime.connectors.ipc_attention import GpuAttentionConnector, Replay, StaleGraph
from afdpatch.runtime.events import Event
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import StatusPage

log = logging.getLogger(__name__)


class StepRoute(Route):
    """A `Route` over GPU connections. Arguments: as `Route` has them."""

    def __init__(self, config: AfdConfig, rank: int, page: StatusPage | None = None, *, group: int = 1) -> None:
        self._gpu = gpu_end(config)
        self._warned = False
        super().__init__(config, rank, page, gpu_connectors(config, self._gpu), group=group)

    @property
    def under_way(self) -> GpuAttentionConnector | None:
        """The connection of the last step that was begun, which `check` wants once the step has been waited for."""
        return self._gpu.under_way

    def hop(self, hidden: Tensor, layer: int, micro_batch: int = 0, out: Tensor | None = None) -> Tensor:
        """As `Route` has it; a hop of the first layer begins a step. A launch that is captured is no hop yet."""
        serving = self._peers.serving
        if serving and torch.cuda.is_current_stream_capturing():
            _, connector = serving[0]
            until = time.monotonic() + self._hop_timeout_s
            return connector.hop(hidden, layer, micro_batch, sequence=0, step=self._step, deadline_s=until, out=out)
        greeting = self._peers.greeting
        if greeting is not None and layer == greeting.layers[0]:
            self._step += 1
        return super().hop(hidden, layer, micro_batch, out)

    def pieces_captured(self, rows: int) -> None:
        """The pieces of the model between the hops of a step of so many rows are captured into graphs.

        Its hops stay launches on this side. On the FFN's they become part of a graph, which is replayed as a whole for
        each step of so many rows from then on, over later connections too.
        """
        if self._gpu.uniform or rows in self._gpu.pieces:
            return
        self._gpu.pieces.add(rows)  # whoever connects from now on says it before the first step of this size
        for _, connector in self._peers.serving:
            assert isinstance(connector, GpuAttentionConnector)
            try:
                connector.capture_other_half(rows, time.monotonic() + self._hop_timeout_s)
            except PeerLost as error:
                self._peers.lose(connector, str(error))

    def begin_replay(self, rows: int) -> bool:
        """To be called before a graph of ``rows`` rows is replayed: the FFN's host replays its half.

        Returns:
            False if the graph must not be replayed, since it went with the connection that it was captured over: the
            step has to be launched anew. Else `end_replay` has to follow the replay, even a failed one: until then no
            other connection takes the place of the step's.

        Raises:
            InvalidHop: no such graph was captured. NoFfnServer: as `hop`. StepLost: the connection went just now.
        """
        greeting = self._peers.greeting
        assert greeting is not None
        layers = greeting.layers
        try:
            self.hop(Replay(rows), layers[0])  # type: ignore[arg-type]  # the connector knows it
        except StaleGraph as error:
            self._missing(str(error))
            return False
        assert self._gpu.under_way is not None  # it has just been announced there
        self._gpu.under_way.hold(rows)
        if self._page is not None:
            self._page.count_hops(len(layers) - 1, rows, rows * self._row_bytes)
        return True

    def end_replay(self) -> None:
        """To be called when the graph's replay is in the current stream."""
        assert self._gpu.under_way is not None
        self._gpu.under_way.replayed()

    def graphs_stand(self) -> bool:
        """Whether a step may be planned as a graph's replay; False is counted as an error."""
        connection = self._gpu.under_way
        if not self._gpu.stale and (connection is None or connection.graphs_stand()):
            return True
        self._missing("the step goes eagerly: its graph was captured over a connection that has gone")
        return False

    def _missing(self, text: str) -> None:
        if not self._warned:
            log.error("%s; restart the attention server to capture its graphs again", text)
            self._warned = True
        if self._page is not None:
            self._page.count(Event.ERROR, text)

    def check(self, connection: GpuAttentionConnector | None) -> None:
        """Whether the steps that were begun on a connection and have been waited for went well.

        Raises:
            StepLost: what they gave is worthless; another try may go well. FfnError: the same, and it wouldn't.
        """
        if connection is None or (error := connection.failure()) is None:
            return
        self._peers.lose(connection, str(error))
        raise type(error)(f"the step was lost under way: {error}; last: {self._peers.last_error}")
