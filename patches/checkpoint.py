"""What both roles must load from: a digest that differs where weights differ, from a few bytes of each tensor."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from afdpatch.runtime.config import ConfigError

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

MAX_TENSORS = 4096
"""At most so many tensors are looked at, evenly over their names."""
SAMPLE_BYTES = 64
"""Bytes from the middle of a tensor."""
MAX_HEADER_BYTES = 100 << 20
"""The safetensors format's own limit of a header."""


def files_of(model: str) -> list[Path] | None:
    """The safetensors files of a local checkpoint, sorted; None if `model` isn't a local folder (a hub's name)."""
    folder = Path(model)
    return sorted(folder.glob("*.safetensors")) if folder.is_dir() else None


def require_safetensors(model: str, load_format: str) -> None:
    """A local checkpoint must be in safetensors: only these are read tensor by tensor.

    Raises:
        ConfigError: it is a folder without any.
    """
    if load_format != "dummy" and files_of(model) == []:
        raise ConfigError(
            "checkpoint files",
            f"no *.safetensors in {model}",
            "allowed: a checkpoint in safetensors, of which each role reads its own tensors only",
        )


def digest(model_config: "ModelConfig", load_config: "LoadConfig") -> str:
    """Both roles' digests are equal when both load the same weights, and differ between a model and its fine-tune.

    A local folder: names, headers and a sample of the tensors' bytes. A hub's name: that name and the revision. Dummy
    weights: that they are, and the seed.
    """
    if load_config.load_format == "dummy":
        return f"dummy weights, seed {model_config.seed}"
    files = files_of(model_config.model)
    if files is None:
        commit = getattr(model_config.hf_config, "_commit_hash", None) or model_config.revision
        return f"{model_config.model} at {commit}"
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            header = file.read(size)
            found.update(f"{path.name} {os.fstat(file.fileno()).st_size} ".encode() + header)
            tensors = sorted((k, v["data_offsets"]) for k, v in json.loads(header).items() if k != "__metadata__")
            for _, (begin, end) in tensors[:: 1 + len(tensors) * len(files) // MAX_TENSORS]:
                file.seek(8 + size + (begin + end) // 2)
                found.update(file.read(min(SAMPLE_BYTES, end - (begin + end) // 2)))
    return found.hexdigest()
