"""The graph seam on vLLM's own classes: what is replayed, what goes eagerly, and what is planned without a graph."""

import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afdpatch.patches import graphs
from afdpatch.patches.settings import CAPTURES, HOP_OP
from afdpatch.runtime.config import ConfigError
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
def piece(monkeypatch: pytest.MonkeyPatch, route: Route) -> Iterator[tuple[Any, Any]]:
    """A piece of the model in a forward of 8 tokens whose pieces have graphs; and the forward's context."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context

    wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    wrapper.vllm_config, wrapper.runtime_mode, wrapper.is_debugging_mode = None, CUDAGraphMode.PIECEWISE, False
    wrapper.compilation_config = CompilationConfig(splitting_ops=["vllm::unified_attention_with_output", HOP_OP])
    wrapper.concrete_cudagraph_entries = {}
    context = ForwardContext(
        no_compile_layers={}, attn_metadata={}, slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
        batch_descriptor=BatchDescriptor(num_tokens=8),
    )  # fmt: skip
    with override_forward_context(context):
        yield wrapper, context


def test_a_forward_whose_pieces_are_captured_is_marked_and_announces_nothing(
    piece: tuple[Any, Any], route: Route
) -> None:
    wrapper, context = piece
    seen: list[bool] = []
    graphs.cuda_graph_wrapper_call(lambda self: seen.append(CAPTURES in context.additional_kwargs))(wrapper)
    assert (seen, route.told) == ([True], [])


def test_a_piece_that_is_replayed_marks_and_announces_nothing(piece: tuple[Any, Any], route: Route) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper

    wrapper, context = piece
    shape = context.batch_descriptor
    wrapper.concrete_cudagraph_entries = {shape: CUDAGraphEntry(shape, cudagraph=Graph(route))}
    graphs.cuda_graph_wrapper_call(CUDAGraphWrapper.__call__)(wrapper)
    assert (context.additional_kwargs, route.told) == ({}, ["replay"])


@pytest.mark.parametrize(
    "change", [{"splitting_ops": ["vllm::unified_attention_with_output"]}, {"use_inductor_graph_partition": True}]
)
def test_no_piece_is_captured_with_a_hop_within(piece: tuple[Any, Any], route: Route, change: dict[str, Any]) -> None:
    wrapper, context = piece
    for name, value in change.items():
        setattr(wrapper.compilation_config, name, value)
    called: list[Any] = []
    with pytest.raises(RuntimeError, match=r"expected afdpatch::ffn among splitting_ops, found .*FULL_DECODE_ONLY"):
        graphs.cuda_graph_wrapper_call(called.append)(wrapper)
    assert (called, context.additional_kwargs) == ([], {})


@pytest.mark.parametrize(
    ("role", "given", "runner"), [("ffn", None, "0"), ("ffn", "1", "1"), ("attention", None, None)]
)
def test_on_a_gpu_an_ffn_server_is_eager_with_the_runner_that_was_measured_and_an_attention_server_as_vllm_has_it(
    monkeypatch: pytest.MonkeyPatch, role: str, given: str | None, runner: str | None
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from afdpatch.patches.config import _settle
    from afdpatch.runtime.config import AfdConfig

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    args = EngineArgs(model="any")
    _settle(args, AfdConfig.parse({"role": role, "connector": "ipc"}))
    assert args.worker_cls.startswith("afdpatch.patches.worker_gpu.")
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == runner
    assert args.enforce_eager is (role == "ffn")
    assert args.compilation_config.cudagraph_mode is None  # vLLM's own default: graphs of pieces and of whole decodes


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("by_inductor", [False, True])
def test_the_model_is_cut_at_hops_where_vllm_cuts_it_at_attention(mode: str, by_inductor: bool) -> None:
    import torch
    from vllm.config import CompilationConfig, CUDAGraphMode

    from afdpatch.patches import model  # noqa: F401 - registers the op
    from afdpatch.patches.config import _cut_at_hops

    config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode[mode],
        splitting_ops=["vllm::unified_attention_with_output"],
        use_inductor_graph_partition=by_inductor,
    )
    for _ in range(2):
        _cut_at_hops(config)
    assert config.splitting_ops == ["vllm::unified_attention_with_output"] + [HOP_OP] * (not by_inductor)
    assert str(torch.ops.afdpatch.ffn.default._schema).startswith(f"{HOP_OP}(Tensor hidden_states, Tensor(a1!) output,")
    whole = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode], splitting_ops=[])
    _cut_at_hops(whole)
    assert whole.splitting_ops == []


@pytest.mark.parametrize(
    ("mode", "partition", "breakable", "found"),
    [
        ("FULL_AND_PIECEWISE", False, "0", None),
        ("FULL_AND_PIECEWISE", True, "0", "use_inductor_graph_partition"),
        ("PIECEWISE", False, "1", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
        ("FULL_DECODE_ONLY", True, "1", None),
        ("NONE", True, "1", None),
    ],
)
def test_pieces_that_are_not_cut_at_hops_are_refused(
    monkeypatch: pytest.MonkeyPatch, mode: str, partition: bool, breakable: str, found: str | None
) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    from afdpatch.patches.features import check_pieces

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode], use_inductor_graph_partition=partition)
    config: Any = types.SimpleNamespace(compilation_config=compilation)
    if found is None:
        check_pieces(config)
    else:
        with pytest.raises(ConfigError, match=f"piecewise CUDA graphs.*{found}"):
            check_pieces(config)


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
