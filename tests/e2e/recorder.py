"""Records a model's parameters after loading and before vLLM repacks them (packed linears keep empty ones)."""

from typing import Any

PARAMETERS: dict[str, int] = {}
"""Name -> bytes of each parameter of the model that this process loaded; tied ones once."""


def record_parameters() -> None:
    """From now on each loaded model's parameters are kept in `PARAMETERS`."""
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading

    def recording(model: Any, *args: Any) -> None:
        PARAMETERS.update((name, p.numel() * p.element_size()) for name, p in model.named_parameters())
        original(model, *args)

    base_loader.process_weights_after_loading = recording
