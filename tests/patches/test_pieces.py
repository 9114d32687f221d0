"""The model cut at hops by vLLM's own splitter, and its pieces replayed as CUDA graphs are: at the same addresses."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.backends import split_graph
from vllm.forward_context import ForwardContext, override_forward_context

from afdpatch.patches.model import RemoteFFN
from afdpatch.patches.settings import CAPTURES, HOP_OP

pytestmark = pytest.mark.e2e
NAMES = ["layers.0.mlp", "layers.1.mlp"]
ATTEND = "afdpatch_test::attend"


class Link:
    """Hops that cross nothing."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.captured: list[int] = []
        self.route = self

    def pieces_captured(self, rows: int) -> None:
        self.captured.append(rows)

    def hop(self, hidden_states: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        self.layers.append(layer)
        out.copy_(hidden_states * 3 + layer)


class Model(nn.Module):
    """Layers with something to compute before, between and behind their hops."""

    def __init__(self, link: Link, names: Sequence[str] = NAMES) -> None:
        super().__init__()
        blank = nn.Identity()
        self.ffns = nn.ModuleList([RemoteFFN.at(name, layer, blank, link) for layer, name in enumerate(names)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for ffn in self.ffns:
            x = ffn(x * 2) + x
        return x


class Attending(Model):
    """The same with something before each hop where vLLM cuts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for ffn in self.ffns:
            x = ffn(torch.ops.afdpatch_test.attend(x * 2) + 1) + x
        return x


class Graph(nn.Module):
    """A piece as a CUDA graph has it: what it reads and gives stays where it was at the capture.

    Nothing is computed while it is captured, as on a GPU: what it gives then is NaN.
    """

    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self.piece = piece
        self.inputs: list[Any] = []
        self.outputs: list[torch.Tensor] = []

    def forward(self, *inputs: Any) -> Any:
        if not self.inputs:
            self.inputs = list(inputs)
            found = self.piece(*inputs)
            self.single = isinstance(found, torch.Tensor)
            self.outputs = [found] if self.single else list(found)
            for output in self.outputs:
                output.fill_(float("nan"))
        else:  # whatever is given now: a graph reads where it read before
            again = self.piece(*self.inputs)
            for output, value in zip(self.outputs, [again] if self.single else again, strict=True):
                output.copy_(value)
        return self.outputs[0] if self.single else tuple(self.outputs)


def shape(graph: torch.fx.GraphModule) -> list[Any]:
    """What a graph computes, without the names of its nodes: pieces of one shape are compiled once."""
    return [
        (node.op, "" if node.op == "placeholder" else str(node.target), [a for a in node.args if isinstance(a, str)])
        for node in graph.graph.nodes
    ]


def cut(model: nn.Module, ops: list[str]) -> tuple[Any, list[bool]]:
    """The compiled model in pieces, each that isn't a cut a `Graph`; and which pieces are cuts."""
    kinds: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        pieces, items = split_graph(graph, ops)
        for item in items:
            kinds.append(item.is_splitting_graph)
            if not item.is_splitting_graph:
                delattr(pieces, item.submod_name)
                setattr(pieces, item.submod_name, Graph(item.graph))
        return pieces.forward

    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False), kinds


@pytest.fixture
def context() -> ForwardContext:
    return ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})


@torch.no_grad()
def test_pieces_that_are_replayed_read_each_hops_answer(context: ForwardContext) -> None:
    link = Link()
    model = Model(link)
    context.no_compile_layers = dict(zip(NAMES, model.ffns, strict=True))
    with override_forward_context(context):
        x = torch.randn(4, 8)  # the runner's own buffer: always the same
        compiled, kinds = cut(model, [HOP_OP])
        context.additional_kwargs[CAPTURES] = True
        compiled(x)
        assert kinds == [False, True, False, True, False]
        assert link.layers == []  # nothing is computed while graphs are captured
        assert link.captured == [4, 4]
        del context.additional_kwargs[CAPTURES]
        for _ in range(3):
            x.copy_(torch.randn(4, 8))
            expected = x
            for layer in range(2):
                expected = expected * 6 + layer + expected
            assert torch.equal(compiled(x), expected)
            assert (link.layers, link.captured) == ([0, 1], [4, 4])
            link.layers.clear()


@torch.no_grad()
def test_an_answer_in_a_fresh_tensor_would_not_be_read(context: ForwardContext) -> None:
    """What the test above is there for: an op that returns its result gives stale values."""
    library = torch.library.Library("afdpatch_test", "FRAGMENT")
    library.define("fresh(Tensor x) -> Tensor")
    library.impl("fresh", lambda x: x * 3, "CPU")
    library._register_fake("fresh", torch.empty_like)

    class Fresh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.afdpatch_test.fresh(x * 2) + x

    with override_forward_context(context):
        x = torch.ones(4, 8)
        compiled, kinds = cut(Fresh(), ["afdpatch_test::fresh"])
        compiled(x)
        assert kinds == [False, True, False]
        x.fill_(2.0)
        assert not torch.equal(compiled(x), x * 7)


@torch.no_grad()
def test_the_pieces_of_layers_are_alike_where_hops_are_cut_out(context: ForwardContext) -> None:
    library = torch.library.Library("afdpatch_test", "FRAGMENT")
    library.define("attend(Tensor x) -> Tensor")
    library.impl("attend", lambda x: x + 1, "CPU")
    library._register_fake("attend", torch.empty_like)
    names = [*NAMES, "layers.2.mlp"]
    model = Attending(Link(), names)
    context.no_compile_layers = dict(zip(names, model.ffns, strict=True))

    def pieces(ops: list[str]) -> list[list[Any]]:
        found: list[list[Any]] = []

        def backend(graph: Any, inputs: Any) -> Any:
            whole, items = split_graph(graph, ops)
            found.extend(shape(item.graph) for item in items if not item.is_splitting_graph)
            return whole.forward

        torch.compiler.reset()
        torch.compile(model, fullgraph=True, backend=backend, dynamic=False)(torch.ones(4, 8))
        return found

    with override_forward_context(context):
        _, attended, between, *others = pieces([ATTEND, HOP_OP])
        assert others[:3] == [attended, between, attended] and len(others) == 4
        _, first, second, _ = pieces([ATTEND])
        changed = [(one, other) for one, other in zip(first, second, strict=True) if one != other]
        assert changed == [tuple(("call_function", "afdpatch.ffn", [n]) for n in names[:2])]
