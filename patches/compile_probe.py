"""Shows that what is installed in the place of a traced function is what torch.compile runs.

`python -m afdpatch.patches.compile_probe FILE` reads a JSON list of `[replacement, kind, form]` from stdin and writes
for each true or an error's text. torch is imported in a process of its own.

Each entry is tried twice. A stand-in of the target's form (function, method, static or class method, property) is put
in effect the way `PatchSet` does it, around a marker, and run eagerly and compiled (fullgraph, backend "eager"): both
must give the marker. And Dynamo is asked whether it would trace or skip the function that the entry really installs.

`qwen3_moe` and `deepseek_v2` are the `probe` of the two traced entries of ours, which patch nothing: they run vLLM's
own decoder layer around our stand-in for its FFN, and look for the one call of `afdpatch::ffn` in the compiled graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

MARK = 100.0


def main(answer: str) -> None:
    """Tries what stdin names, and writes the answers to a file."""
    results: list[bool | str] = []
    for replacement, kind, form in json.load(sys.stdin):
        try:
            probe(form)
            probe_replacement(replacement, kind)
            results.append(True)
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}".splitlines()[0])
    temporary = Path(f"{answer}.new")
    temporary.write_text(json.dumps(results), encoding="utf-8")
    temporary.replace(answer)


def install(owner: Any, name: str, wrap: Callable[[Any], Any] | None = None) -> None:
    """Puts a function that adds the marker in the place of another, in the same form, as a transaction would."""
    from afdpatch.registry import forms
    from afdpatch.registry.journal import Slot

    raw = vars(owner)[name]
    original = forms.function_of(raw)

    def marked(*args: Any) -> Any:
        return original(*args) + MARK

    made: Any = marked if wrap is None else wrap(original)
    if not isinstance(made, FunctionType) or type(made) is not FunctionType:
        Slot(owner, name, made).fill()
        return
    Slot(owner, name, forms.shaped(raw, owner, name, made)).fill()


def stand_in(form: str) -> tuple[Any, str, Callable[[Any], Any]]:
    """A fresh target of a form: its owner, its name, and a function of one tensor that uses it."""
    if form == "function":
        import types

        module = types.ModuleType("afdpatch_probe")
        exec("def target(x):\n    return x + 1\n", vars(module))
        return module, "target", lambda x: module.target(x) * 2

    class Owner:
        def __init__(self) -> None:
            self.value: Any = None

        def target(self, x: Any) -> Any:
            return x + 1

    if form == "staticmethod":
        Owner.target = staticmethod(lambda x: x + 1)  # type: ignore[method-assign,assignment]
    elif form == "classmethod":
        Owner.target = classmethod(lambda cls, x: x + 1)  # type: ignore[method-assign,assignment]
    elif form == "property":
        Owner.target = property(lambda self: self.value + 1)  # type: ignore[method-assign,assignment]
    instance = Owner()

    def use(x: Any) -> Any:
        if form == "property":
            instance.value = x
            return instance.target * 2  # type: ignore[operator]
        return instance.target(x) * 2

    return Owner, "target", use


def probe(form: str, wrap: Callable[[Any], Any] | None = None) -> None:
    """Tries one form.

    Args:
        form: `function`, `method`, `staticmethod`, `classmethod` or `property`.
        wrap: what to install, given the original; None: a plain function around it.

    Raises:
        AssertionError: the compiled run isn't the eager one, or the eager one isn't the patched one.
        Exception: torch.compile couldn't trace it.
    """
    import torch

    owner, name, use = stand_in(form)
    install(owner, name, wrap)
    x = torch.ones(3)
    eager = use(x)
    compiled = torch.compile(use, fullgraph=True, backend="eager")(x)
    if not torch.equal(eager, (x + 1 + MARK) * 2):
        raise AssertionError(f"{form}: the eager run gives {eager[0]:g}, not the patched {(2 + MARK) * 2:g}")
    if not torch.equal(compiled, eager):
        raise AssertionError(f"{form}: compiled, it gives {compiled[0]:g}; eagerly, {eager[0]:g}")


def probe_replacement(replacement: str, kind: str) -> None:
    """Asks Dynamo whether it would skip the function that an entry really installs.

    Raises:
        AssertionError: it would, or torch.compile is told to leave it out.
    """
    import importlib

    from torch._dynamo import trace_rules

    module, _, qualname = replacement.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    if kind == "wrap":

        def original(*args: Any, **kwargs: Any) -> Any:
            return None

        value = value(original)
    if getattr(value, "_torchdynamo_disable", False):
        raise AssertionError(f"{replacement} is marked with torch.compiler.disable")
    if trace_rules.check(value):
        raise AssertionError(f"{replacement}: Dynamo skips the functions of {value.__code__.co_filename}")


# ---- the cut in vLLM's decoder layers -------------------------------------------------------------------------------


def qwen3_moe() -> bool:
    """The probe of `model.qwen3-moe`: as `hop_in_graph`."""
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

    return hop_in_graph(Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock)


def deepseek_v2() -> bool:
    """The probe of `model.deepseek-v2`: as `hop_in_graph`."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MoE

    return hop_in_graph(DeepseekV2DecoderLayer, DeepseekV2MoE)


def hop_in_graph(decoder: Any, ffn: Any) -> bool:
    """Runs a decoder layer's own `forward`, with our stand-in as its FFN, eagerly and compiled.

    The norms and the attention around it are stand-ins too; the hop adds the marker instead of crossing.

    Args:
        decoder: vLLM's class of the decoder layer.
        ffn: the class of the FFN that is stood for.

    Returns:
        True.

    Raises:
        AssertionError: the compiled graph hasn't exactly one call of the op, or compiled and eager runs differ.
        Exception: torch.compile couldn't trace it.
    """
    import torch
    from torch import nn
    from vllm.forward_context import ForwardContext, override_forward_context

    from afdpatch.patches.model import RemoteFFN

    class Norm(nn.Module):
        def forward(self, x: Any, residual: Any = None) -> Any:
            return x if residual is None else (x + residual, x + residual)

    class Attention(nn.Module):
        def forward(self, positions: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return hidden_states * 2

    class Link:
        connector: Any = None

        def hop(self, hidden_states: Any, layer: int, out: Any) -> None:
            out.copy_(hidden_states + MARK)

    link = Link()
    link.connector = link
    layer = decoder.__new__(decoder)
    nn.Module.__init__(layer)
    layer.use_mha = layer.use_sequence_parallel_moe = False
    layer.routed_scaling_factor, layer.layer_idx = 1.0, 0
    layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn = Norm(), Norm(), Attention()
    blank = ffn.__new__(ffn)
    nn.Module.__init__(blank)
    layer.mlp = RemoteFFN.at("layers.0.mlp", 0, blank, link)
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(sum("afdpatch.ffn" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def use(x: Any) -> Any:
        return layer(torch.arange(3), x, None)

    x = torch.ones(3, 4)
    context = ForwardContext(no_compile_layers={"layers.0.mlp": layer.mlp}, attn_metadata={}, slot_mapping={})
    with override_forward_context(context), torch.no_grad():
        eager = use(x)
        compiled = torch.compile(use, fullgraph=True, backend=backend)(x)
    if calls != [1]:
        raise AssertionError(f"{decoder.__name__}: {calls} calls of afdpatch::ffn in the compiled graphs, not one")
    if not all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True)):
        raise AssertionError(f"{decoder.__name__}: compiled, it gives {compiled}; eagerly, {eager}")
    if not eager[0].min() > MARK:
        raise AssertionError(f"{decoder.__name__}: the eager run doesn't hop: {eager}")
    return True


if __name__ == "__main__":
    main(sys.argv[1])
