"""The graph seam on vLLM's own classes: what is replayed, what goes eagerly, and what is planned without a graph."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afdpatch.patches import graphs
from afdpatch.runtime.connectors.base import ConnectorError

pytestmark = pytest.mark.e2e


class Route:
    """Says whether graphs stand, and notes what it was told."""

    def __init__(self) -> None:
        self.stands = True
        self.told: list[object] = []

    def begin_replay(self, rows: int) -> bool:
        self.told.append(rows)
        return self.stands

    def end_replay(self) -> None:
        self.told.append("end")

    def graphs_stand(self) -> bool:
        return self.stands


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Route:
    made = Route()
    settings = types.SimpleNamespace(link=types.SimpleNamespace(route=made))
    monkeypatch.setattr(graphs, "settings_of", lambda vllm_config: settings)
    return made


class Graph:
    """A captured graph."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def replay(self) -> None:
        self.route.told.append("replay")


@pytest.fixture
def v1(monkeypatch: pytest.MonkeyPatch, route: Route) -> Iterator[Callable[[], Any]]:
    """A call of a `CUDAGraphWrapper` that has a graph of 8 tokens, in the forward of such a step."""
    from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    shape = BatchDescriptor(num_tokens=8)
    wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    wrapper.runnable = lambda: route.told.append("eager")
    wrapper.vllm_config, wrapper.runtime_mode, wrapper.is_debugging_mode = None, CUDAGraphMode.FULL, False
    wrapper.concrete_cudagraph_entries = {shape: CUDAGraphEntry(shape, cudagraph=Graph(route))}
    call = graphs.cuda_graph_wrapper_call(CUDAGraphWrapper.__call__)
    context = ForwardContext(
        no_compile_layers={}, attn_metadata={}, slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=shape,
    )  # fmt: skip
    with override_forward_context(context):
        yield lambda: call(wrapper)


def test_v1_replays_a_graph_between_its_announcement_and_its_end(v1: Callable[[], Any], route: Route) -> None:
    v1()
    assert route.told == [8, "replay", "end"]


def test_v1_launches_a_step_whose_graph_has_gone(v1: Callable[[], Any], route: Route) -> None:
    route.stands = False
    v1()
    assert route.told == [8, "eager"]


@pytest.fixture
def v2(route: Route) -> Any:
    """A `CudaGraphManager` with a graph of 8 tokens."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    manager = CudaGraphManager.__new__(CudaGraphManager)
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, uniform_token_count=1)
    manager.vllm_config, manager.graphs, manager._graphs_captured = None, {desc: Graph(route)}, True
    manager._candidates, manager._lora_dispatch_map = {(5, 0): [desc]}, {}
    return manager


def test_v2_plans_and_replays_a_graph(v2: Any, route: Route) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    planned = graphs.dispatch(CudaGraphManager.dispatch)(v2, 5, 5, 1, 0)
    graphs.run_fullgraph(CudaGraphManager.run_fullgraph)(v2, planned)
    assert route.told == [8, "replay", "end"]


def test_v2_plans_no_graph_that_has_gone_and_loses_a_step_that_was_planned_before(v2: Any, route: Route) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    dispatch = graphs.dispatch(CudaGraphManager.dispatch)
    before = dispatch(v2, 5, 5, 1, 0)
    route.stands = False
    planned = dispatch(v2, 5, 5, 1, 0)
    assert (planned.cg_mode, planned.num_tokens, planned.num_reqs) == (CUDAGraphMode.NONE, 5, 5)
    with pytest.raises(ConnectorError, match="its graph with it"):
        graphs.run_fullgraph(CudaGraphManager.run_fullgraph)(v2, before)
    assert route.told == [8]
