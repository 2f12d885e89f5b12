"""The base of all heads with attention: how they are called, what they see, how their weights are put in."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.layers.attention import ATTENTION_NAME, Visibility
from outrider.engine.layers.kv_layout import LayerLayout, UnsupportedModelError, layout_of_config

NUM_NAMED: Final = 3
_PRECISE: Final = "e_score_correction_bias"  # what routers add to their scores stays in float32


class DraftHead(nn.Module):
    """A head whose layers attend. The row of a token takes the feature of the token before it and gives its own.

    The first token of a sequence has no feature before it, and no other row sees it (`hides_first`).
    """

    config: Any  # transformers' configuration of its layers
    vocab_size: int  # the target's
    hidden_size: int  # of a feature
    layout: tuple[LayerLayout, ...]  # of its layers' KV
    embed_tokens: nn.Embedding
    norm: nn.Module
    feeds_normalized: bool
    """Whether the next row takes a row's state after `norm`, and not before it."""

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the rows' states before `norm`, `[1, num_rows, hidden_size]`. Attends within `attending`.

        token_ids, positions: `[1, num_rows]`. features: `[1, num_rows, hidden_size]`, of the entries before.
        """

    @abstractmethod
    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 logits from states after `norm`.  # [num_rows, hidden_size] -> [num_rows, vocab_size]"""

    def output_layer(self) -> nn.Module:
        """The layer that makes the logits."""
        found = self.lm_head
        assert isinstance(found, nn.Module)
        return found

    def set_experts_implementation(self, name: str) -> None:
        """Chooses how transformers computes the layers' experts, as models of transformers do."""
        self.config._experts_implementation = name


def hides_first(layers: tuple[LayerLayout, ...]) -> tuple[LayerLayout, ...]:
    """The same layers, in which no row but the first sees the first entry.

    References drop the first token. Their positions are then one less than ours, which rotary embeddings do not tell.
    """
    rules: dict[Visibility | None, Visibility] = {}
    for layer in layers:
        rules.setdefault(layer.visibility, _without_first(layer.visibility))
    return tuple(replace(layer, visibility=rules[layer.visibility]) for layer in layers)


def _without_first(rule: Visibility | None) -> Visibility:
    def sees(sequence: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        permitted = (key > 0) | (query == 0)
        return permitted if rule is None else permitted & rule(sequence, head, query, key)

    return sees


def build_layers(
    hf_config: Any, folder: Path, layout: tuple[LayerLayout, ...] | None = None
) -> tuple[Any, nn.Module, tuple[LayerLayout, ...]]:
    """transformers' decoder without weights (on the meta device), its rotary embedding with numbers, the KV layout.

    layout: of a family that cannot be watched. Raises ModelLoadError.
    """
    from transformers import AutoModel

    config = copy.deepcopy(hf_config)
    config.vocab_size, config.pad_token_id = 1, None  # the head brings its own embedding
    try:
        layers = layout or layout_of_config(config)
        with torch.device("meta"):
            body = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME)
        return body, type(body.rotary_emb)(config=config), layers
    except (UnsupportedModelError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"the engine cannot run the layers of {folder}: {error}") from error


def put_weights(module: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Gives a module built on the meta device its weights.

    Raises ModelLoadError naming what is missing, does not fit or has no place: a norm that was left out would only be
    seen as fewer accepted tokens.
    """
    expected = {name: each for name, each in module.state_dict().items() if each.device.type == "meta"}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} tensors of its head, such as {', '.join(missing[:NUM_NAMED])}; the weights "
            "are incomplete or of another architecture"
        )
    if unexplained := sorted(tensors.keys() - expected.keys()):
        raise ModelLoadError(
            f"{folder} has {len(unexplained)} tensors that its configuration does not explain, such as "
            f"{', '.join(unexplained[:NUM_NAMED])}"
        )
    for name, each in expected.items():
        if tensors[name].shape != each.shape:
            raise ModelLoadError(
                f"{folder}: {name} has the shape {list(tensors[name].shape)}, and its configuration promises "
                f"{list(each.shape)}"
            )
    fitting = {name: tensors[name].to(torch.float32 if name.endswith(_PRECISE) else dtype) for name in expected}
    module.load_state_dict(fitting, strict=False, assign=True)
    module.eval().requires_grad_(False)
