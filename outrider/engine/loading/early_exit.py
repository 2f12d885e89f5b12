"""A model's first layers as a model of their own: early exit (LayerSkip, 2404.16710).

What is left is the embedding, the first layers, the final norm and the output layer of the same folder. Checkpoints
that were trained with an early-exit loss predict well from there; others do so as far as their first layers go.
"""

from __future__ import annotations

from typing import Any

from outrider.engine.kv.kv_plan import ModelLoadError


def exit_early(hf_config: Any, num_layers: int | None) -> None:
    """Cuts a configuration down to its first layers, before the model is built. Raises ModelLoadError.

    num_layers: None leaves it as it is.
    """
    if num_layers is None:
        return
    text_config = hf_config.get_text_config()
    all_layers: int = text_config.num_hidden_layers
    if num_layers < 1:
        raise ModelLoadError(f"--early-exit-layer {num_layers}: at least one layer must run")
    if num_layers >= all_layers:
        raise ModelLoadError(
            f"--early-exit-layer {num_layers} leaves nothing out: the model has {all_layers} layers; choose fewer"
        )
    if getattr(text_config, "hidden_size_per_layer_input", None):
        raise ModelLoadError(
            f"--early-exit-layer: {text_config.model_type} has one embedding for all layers together, of which a part "
            "cannot be read; draft with another model"
        )
    if hasattr(text_config, "scale_depth"):  # MiniCPM's layers divide it by the root of their number
        text_config.scale_depth *= (num_layers / all_layers) ** 0.5
    # Some families have lists with an entry for each layer, such as the kind of its attention.
    for name, value in vars(text_config).items():
        if isinstance(value, list) and len(value) == all_layers:
            setattr(text_config, name, value[:num_layers])
    text_config.num_hidden_layers = num_layers
