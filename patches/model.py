"""Model seam: the role's stand-ins in the place of the other role's modules, before weights exist."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.utils.torch_utils import direct_register_custom_op

from afdpatch.patches.models import ModelRow
from afdpatch.patches.settings import CAPTURES, AfdSettings, settings_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

META = torch.device("meta")


def create_model(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Around `BaseModelLoader.create_model`: builds the model, the other role's part on meta, and cuts it."""

    @functools.wraps(original)
    def wrapper(self: Any, vllm_config: "VllmConfig", model_config: "ModelConfig", prefix: str = "") -> nn.Module:
        settings = settings_of(vllm_config)
        if settings is None:
            return original(self, vllm_config, model_config, prefix)
        with _other_role_on_meta(settings):
            model = original(self, vllm_config, model_config, prefix)
        return cut(model, vllm_config, settings)

    return wrapper


# ---- building -------------------------------------------------------------------------------------------------------


def ffn_classes(row: ModelRow) -> list[type[nn.Module]]:
    """The classes of a row's `ffn_classes`."""
    return [getattr(importlib.import_module(m), c) for m, c in (name.split(":") for name in row.ffn_classes)]


@contextmanager
def _other_role_on_meta(settings: AfdSettings) -> Iterator[None]:
    """Attention: FFN classes are built on meta. FFN: everything is built on meta but the FFN classes."""
    here = torch.get_default_device()
    with ExitStack() as stack:
        for cls in ffn_classes(settings.row):
            stack.enter_context(_built_on(cls, META if settings.role == "attention" else here))
        if settings.role == "ffn":
            stack.enter_context(META)
        yield


@contextmanager
def _built_on(cls: type[nn.Module], device: torch.device) -> Iterator[None]:
    """Instances of `cls` made inside of the context are built on `device`."""
    init = cls.__dict__["__init__"]

    @functools.wraps(init)
    def on_device(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        with device:
            init(self, *args, **kwargs)

    cls.__init__ = on_device  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__ = init  # type: ignore[method-assign]


# ---- cutting --------------------------------------------------------------------------------------------------------


class Absent(PPMissingLayer):
    """Stands where the FFN server has nothing. vLLM's loaders skip it, as on another pipeline stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never called: the FFN server runs FFNs only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this module belongs to the attention server; an FFN server runs the layers' FFNs only")


class RemoteFFN(PPMissingLayer):
    """Stands on the attention server where a layer's FFN was; its forward is a hop to the FFN server and back.

    `at` makes one that is still an instance of the class it stands for, since decoder layers ask (DeepSeek-V2 in fp16).
    """

    @staticmethod
    def at(name: str, layer: int, original: nn.Module, link: Any) -> "RemoteFFN":
        """A stand-in for `original`, the FFN of `layer`, whose path in the model is `name`."""
        cls = type(original)
        stand_in: RemoteFFN = type(f"Remote{cls.__name__}", (RemoteFFN, cls), {})()
        stand_in.name, stand_in.layer, stand_in.link = name, layer, link
        return stand_in

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.name = ""
        self.layer = -1
        self.link: Any = None

    def forward(self, hidden_states: torch.Tensor, already_sequence_parallel: bool = False) -> torch.Tensor:
        """Hidden states [rows, hidden] -> the FFN's output, same shape and dtype.

        Raises:
            NotImplementedError: rows sharded over tensor-parallel ranks (sequence-parallel MoE).
        """
        if already_sequence_parallel:
            raise NotImplementedError("sequence-parallel MoE (already_sequence_parallel) is not supported by AFD")
        output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        torch.ops.afdpatch.ffn(hidden_states, output, self.name)
        return output

    def ffn_into(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """The hop: what the custom op calls."""
        self.link.hop(hidden_states, self.layer, output)

    def pieces_captured(self, rows: int) -> None:
        """In the place of the hop while the pieces of the model around it are captured into CUDA graphs."""
        self.link.route.pieces_captured(rows)


def cut(model: nn.Module, vllm_config: "VllmConfig", settings: AfdSettings) -> nn.Module:
    """Put the role's stand-ins into a model that was just built; returns the model.

    Raises:
        RuntimeError: the model isn't as its row says, or something of this role was left without memory.
    """
    found = list(ffns(model, settings.row))
    context = vllm_config.compilation_config.static_forward_context
    if settings.role == "attention":
        for name, layer, parent, ffn in found:
            _forget(context, ffn)
            stand_in = RemoteFFN.at(name, layer, ffn, settings.link)
            setattr(parent, settings.row.ffn, stand_in)
            context[name] = stand_in
    else:
        kept = [ffn for _, _, _, ffn in found]
        _empty(model, {id(m) for ffn in kept for m in ffn.modules()}, set(map(id, _ancestors(model, kept))), context)
    _check_memory(model)
    settings.link.count_weights(model)
    return model


def ffns(model: nn.Module, row: ModelRow) -> Iterator[tuple[str, int, nn.Module, nn.Module]]:
    """Path, layer, decoder layer and FFN of each decoder layer.

    Raises:
        RuntimeError: a layer has no FFN where the row says, or one of another class.
    """
    classes = tuple(ffn_classes(row))
    for layer, decoder in enumerate(model.get_submodule(row.layers).children()):
        name = f"{row.layers}.{layer}.{row.ffn}"
        ffn = getattr(decoder, row.ffn, None)
        if not isinstance(ffn, classes):
            raise RuntimeError(
                f"{row.architecture}: expected one of {', '.join(row.ffn_classes)} at {name}, "
                f"found {type(ffn).__name__}; the model's row in the table doesn't fit this vLLM"
            )
        yield name, layer, decoder, ffn


def _ancestors(model: nn.Module, kept: list[nn.Module]) -> Iterator[nn.Module]:
    inside = {id(ffn) for ffn in kept}
    for module in model.modules():
        if any(id(descendant) in inside for descendant in module.modules()):
            yield module


def _empty(model: nn.Module, kept: set[int], ancestors: set[int], context: dict[str, Any]) -> None:
    """Replace each child of an ancestor of a kept module, unless it is kept or an ancestor itself."""
    for module in list(model.modules()):
        if id(module) not in ancestors or id(module) in kept:
            continue
        for name, child in list(module.named_children()):
            if id(child) not in kept and id(child) not in ancestors:
                _forget(context, child)
                setattr(module, name, Absent())  # type: ignore[no-untyped-call]


def _forget(context: dict[str, Any], removed: nn.Module) -> None:
    """Take what a removed module registered out of vLLM's static forward context."""
    gone = {id(module) for module in removed.modules()}
    for name in [name for name, module in context.items() if id(module) in gone]:
        del context[name]


def _check_memory(model: nn.Module) -> None:
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(
            f"built on the meta device but needed by this role: {', '.join(left[:5])} ({len(left)} tensors)"
        )


# ---- the hop as an op -----------------------------------------------------------------------------------------------


def _ffn(hidden_states: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    context = get_forward_context()
    layer: Any = context.no_compile_layers[layer_name]
    if CAPTURES in context.additional_kwargs:
        layer.pieces_captured(len(hidden_states))  # which are whatever lay in the graphs' memory
    else:
        layer.ffn_into(hidden_states, output)


def _ffn_fake(hidden_states: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    return


LIBRARY = torch.library.Library("afdpatch", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the op `afdpatch::ffn(Tensor hidden_states, Tensor(a!) output, str layer_name) -> ()`, opaque to torch.compile.
The layer is found by name in vLLM's forward context, as vLLM's own attention and MoE ops do.

It writes into a tensor of its caller's: where the compiled model is cut at it and what lies between is replayed from
CUDA graphs, the next graph reads at the address at which it read while it was captured."""
direct_register_custom_op("ffn", _ffn, mutates_args=["output"], fake_impl=_ffn_fake, target_lib=LIBRARY)
