"""The model table and the feature table (manifests/models.yaml). Imports neither vllm nor torch."""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from afdpatch.runtime.config import ConfigError


@dataclass(frozen=True)
class ModelRow:
    """Where one architecture is cut, and which weights belong to which side."""

    architecture: str
    """vLLM's name of the model class, as in a checkpoint's `architectures`."""
    seam: str
    """The manifest's entry that pins the decoder layer and its FFN classes."""
    layers: str
    """Path of the list of decoder layers, from the model's root."""
    ffn: str
    """Attribute of a decoder layer that is its FFN."""
    ffn_classes: tuple[str, ...]
    """`module:Class` of everything that may stand there."""
    ffn_weights: tuple[str, ...]
    """Regular expressions of the FFN's names in a checkpoint; group 1 is the layer's index."""
    shared: tuple[str, ...]
    """Regular expressions of names that both roles hold."""
    dtypes: tuple[str, ...]
    """Names of torch dtypes that were tested."""
    notes: str

    def owner(self, name: str) -> str:
        """Who holds a tensor of a checkpoint: "ffn", "attention" or "both"."""
        if any(re.match(pattern, name) for pattern in self.shared):
            return "both"
        return "ffn" if any(re.match(pattern, name) for pattern in self.ffn_weights) else "attention"


@dataclass(frozen=True)
class Refusal:
    """A feature that AFD doesn't do."""

    id: str
    what: str
    why: str


@dataclass(frozen=True)
class Tables:
    """Both tables."""

    models: dict[str, ModelRow]
    refused: dict[str, Refusal]

    def row(self, architectures: list[str]) -> ModelRow:
        """The row of a checkpoint's `architectures`.

        Raises:
            ConfigError: none of them is in the table.
        """
        for architecture in architectures:
            if architecture in self.models:
                return self.models[architecture]
        raise ConfigError(
            "model architecture",
            ", ".join(architectures) or "none",
            f"AFD serves {', '.join(sorted(self.models))} (see `afdpatch models`)",
        )


def _row(architecture: str, row: dict[str, Any]) -> ModelRow:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return ModelRow(architecture, **{**row, **lists})


@lru_cache(maxsize=1)
def tables() -> Tables:
    """manifests/models.yaml, read once."""
    import yaml

    text = files("afdpatch.manifests").joinpath("models.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    models = {name: _row(name, row) for name, row in data["models"].items()}
    return Tables(models, {key: Refusal(key, **value) for key, value in data["refused"].items()})
