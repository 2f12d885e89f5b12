"""Layout of a model's KV cache, found by watching it attend instead of relying on the names in its configuration.

The model runs once over a few tokens with an attention function that only records its arguments: how many heads of keys
and values, how wide they are, and which keys transformers' mask lets a query see. That covers grouped heads, latent
attention (keys and values of different widths), layers of different kinds, sliding windows, chunked attention, and
shards of tensor-parallel models alike. Nothing is computed from the weights, so a model without any, on the meta
device, suffices: `layout_of_config` needs only a configuration.

A model that does not call transformers' attention interface at least once for every layer is refused with the cause: it
keeps another state than keys and values, or computes its attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import causal_mask_function

from outrider.engine.layers.attention import Visibility
from outrider.errors import ConfigurationError

WATCHING_NAME: Final = "outrider_watching"
NUM_TOKENS: Final = 8
# transformers' names for kinds of layers whose state is keys and values.
ATTENDING_KINDS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


class UnsupportedModelError(ConfigurationError):
    """The paged KV cache cannot serve this model; the message says why."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """KV entries of one attention call per token, and the visibility rule of its queries."""

    num_kv_heads: int  # of this rank
    key_dim: int
    value_dim: int
    visibility: Visibility | None  # None: every position up to its own
    is_plain: bool = True  # softmax of scaled scores: no softcap, no sinks

    @property
    def num_entries(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def bytes_per_token(layers: Sequence[LayerLayout], dtype: torch.dtype) -> int:
    """KV bytes per token in all layers together."""
    return dtype.itemsize * sum(layer.num_entries for layer in layers)


@dataclass(slots=True)
class _Watch:
    """Records of one forward pass."""

    layers: list[LayerLayout] = field(default_factory=list)
    masks: dict[int, Visibility | None] = field(default_factory=dict)  # by identity of the mask passed out
    kept: list[torch.Tensor] = field(default_factory=list)  # keeps identities unique


_watch: ContextVar[_Watch] = ContextVar("outrider_watch")


def layout_of_config(hf_config: Any) -> tuple[LayerLayout, ...]:
    """The layout of a model of this configuration, built without weights. Raises UnsupportedModelError."""
    return find_layout(empty_model(hf_config))


def empty_model(hf_config: Any) -> Any:
    """A model of this configuration on the meta device, without weights. Raises UnsupportedModelError."""
    from transformers import AutoModelForCausalLM

    refuse_other_states(hf_config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    except ValueError as error:
        raise UnsupportedModelError(f"transformers has no decoder for {type(hf_config).__name__}") from error


@torch.inference_mode()
def find_layout(model: Any) -> tuple[LayerLayout, ...]:
    """One entry per attention call, in the order of the calls. Raises UnsupportedModelError.

    Changes the model's attention implementation.
    """
    refuse_other_states(model.config)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError("it keeps a recurrent state, which cannot be rolled back when a hint is rejected")
    with _watching(model) as watch:
        # A mask without holes: without any, transformers would look for several packed sequences, and find them.
        inputs = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=model.device)
        model(
            input_ids=inputs,
            position_ids=torch.arange(NUM_TOKENS, device=model.device).unsqueeze(0),
            attention_mask=torch.ones_like(inputs),
            use_cache=False,
        )
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(watch.layers) < num_layers:
        raise UnsupportedModelError(
            f"{len(watch.layers)} of its {num_layers} layers attend through transformers' attention interface; "
            "the others compute their attention without the paged cache"
        )
    return tuple(watch.layers)


def refuse_other_states(hf_config: Any) -> None:
    """Refuses a model by its configuration alone. Raises UnsupportedModelError with the model's name and the cause."""
    name = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    text_config = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder and a decoder; the engine runs decoders alone")
    kinds = set(getattr(text_config, "layer_types", None) or ()) - ATTENDING_KINDS
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(sorted(kinds))}, whose state is not keys and values and cannot "
            "be rolled back when a hint is rejected"
        )


@contextmanager
def _watching(model: Any) -> Iterator[_Watch]:
    model.set_attn_implementation(WATCHING_NAME)
    is_empty = model.device.type == "meta"
    if is_empty and model._can_set_experts_implementation():
        model.set_experts_implementation(WATCHING_NAME)  # which expert is chosen depends on weights
    watch = _Watch()
    token = _watch.set(watch)
    try:
        yield watch
    except (RuntimeError, NotImplementedError) as error:
        if not is_empty:
            raise
        raise UnsupportedModelError(f"its layers cannot be run without weights: {error}") from error
    finally:
        _watch.reset(token)


def _write_down_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    watch = _watch.get()
    if attention_mask is not None and id(attention_mask) not in watch.masks:
        raise UnsupportedModelError(
            "it changes its attention mask by itself, so that what a query sees is not a rule of positions"
        )
    visibility = None if attention_mask is None else watch.masks[id(attention_mask)]
    is_plain = softcap is None and s_aux is None
    watch.layers.append(LayerLayout(key.shape[1], key.shape[-1], value.shape[-1], visibility, is_plain))
    return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None


def _write_down_mask(
    *, q_length: int, kv_length: int, mask_function: Visibility, device: Any = None, **_unused: Any
) -> torch.Tensor:
    watch = _watch.get()
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    watch.kept.append(mask)
    watch.masks[id(mask)] = None if mask_function is causal_mask_function else mask_function
    return mask


def _no_experts(_module: nn.Module, hidden_states: torch.Tensor, *_routing: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


AttentionInterface.register(WATCHING_NAME, _write_down_attention)
AttentionMaskInterface.register(WATCHING_NAME, _write_down_mask)
ExpertsInterface.register(WATCHING_NAME, _no_experts)
