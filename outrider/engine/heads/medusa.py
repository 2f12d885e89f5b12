"""Medusa heads (Cai et al., 2401.10774): each guesses one later token from the target's last hidden state.

Head `k` (from 0) over the state of position `i` guesses the token at `i + 2 + k`; the target itself gives `i + 1`. The
state is the one that the target's output layer reads, after the final norm. A head is residual blocks
`x + silu(linear(x))` and an output layer. Published names: `{head}.{layer}.linear.weight` and `{head}.{number of
layers}.weight`, also below `medusa_heads.`; vLLM's `blocks.{head}.layers.{layer}.weight` and `lm_heads.{head}.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from outrider.engine.heads.checkpoint import HeadFolder, TargetShape
from outrider.engine.heads.head import put_weights
from outrider.engine.kv.kv_plan import ModelLoadError

SHARED_OUTPUT: Final = "lm_heads.0.weight"
_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class MedusaDescription:
    """The shape of Medusa heads by their tensors; their configuration often names too few of them."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    has_bias: bool
    num_outputs: int  # output layers: one for each head, or one for all

    names: Mapping[str, str]  # of tensors in the files, by their names here


def describe(head: HeadFolder, target: TargetShape) -> MedusaDescription:
    """Reads the headers of Medusa heads. Raises ModelLoadError where they do not fit the target."""
    names = _names(head)
    blocks = [found for name in names if (found := _BLOCK.fullmatch(name))]
    num_heads = 1 + max((int(each[1]) for each in blocks), default=-1)
    num_layers = 1 + max((int(each[2]) for each in blocks), default=-1)
    head.files.require(
        names.get(f"blocks.{number}.{layer}.weight", f"{number}.{layer}.linear.weight")
        for number in range(num_heads)
        for layer in range(num_layers)
    )
    hidden_size = (head.files.shape(names["blocks.0.0.weight"]) or (0, 0))[1]
    if hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"{head.folder} was made for a target with hidden states of {hidden_size}, and {target.model} has "
            f"{target.hidden_size}"
        )
    is_shared = bool(head.config.get("original_lm_head", False))
    num_outputs = 1 if is_shared else num_heads
    if not is_shared:
        head.files.require(
            names.get(f"lm_heads.{number}.weight", f"{number}.{num_layers}.weight") for number in range(num_heads)
        )
    outputs = names.get(SHARED_OUTPUT)
    rows = target.vocab_size if outputs is None else (head.files.shape(outputs) or (0,))[0]
    map_shape = head.files.shape("token_map")
    draft_vocab_size = rows if map_shape is None else map_shape[0]
    if rows != target.vocab_size and (map_shape is None or rows != draft_vocab_size):
        raise ModelLoadError(
            f"{head.folder} was made for a vocabulary of {rows} tokens, and {target.model} has {target.vocab_size}"
        )
    return MedusaDescription(
        num_heads,
        num_layers,
        hidden_size,
        target.vocab_size,
        draft_vocab_size,
        any(each[3] == "bias" for each in blocks),
        num_outputs,
        names,
    )


class MedusaHeads(nn.Module):
    """All heads of a checkpoint."""

    def __init__(self, described: MedusaDescription, target_ids: torch.Tensor | None) -> None:
        """target_ids: the target's ids of the heads' tokens, None where they are the same."""
        super().__init__()
        width = described.hidden_size
        self.num_heads, self.vocab_size = described.num_heads, described.vocab_size
        self.target_ids = target_ids
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.ModuleList(nn.Linear(width, width, bias=described.has_bias) for _ in range(described.num_layers))
                for _ in range(described.num_heads)
            )
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, described.draft_vocab_size, bias=False) for _ in range(described.num_outputs)
            )

    @torch.inference_mode()
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 logits of every head.  # [num_rows, hidden_size] -> [num_heads, num_rows, vocab_size]"""
        return torch.stack([self._logits(number, hidden_states) for number in range(self.num_heads)])

    def _logits(self, number: int, states: torch.Tensor) -> torch.Tensor:
        blocks = self.blocks[number]
        assert isinstance(blocks, nn.ModuleList)
        for linear in blocks:
            states = states + functional.silu(linear(states))
        own: torch.Tensor = self.lm_heads[min(number, len(self.lm_heads) - 1)](states).float()
        if self.target_ids is None:
            return own
        spread = own.new_full((own.shape[0], self.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.target_ids, own)


def load(head: HeadFolder, target: TargetShape, shared: Mapping[str, torch.Tensor], dtype: torch.dtype) -> MedusaHeads:
    """Medusa heads of a folder. Raises ModelLoadError.

    shared: the target's `lm_head.weight`, where the heads use it (`needs_shared`).
    """
    described = describe(head, target)
    target_ids = _token_map(described, head)
    tensors = head.files.read(described.names, head.config.get("quantization_config"))
    if needs_shared(described):
        tensors[SHARED_OUTPUT] = shared["lm_head.weight"]
    for number in range(described.num_outputs):
        name = f"lm_heads.{number}.weight"
        if target_ids is not None and tensors[name].shape[0] == described.vocab_size:
            tensors[name] = tensors[name][target_ids]
    built = MedusaHeads(described, target_ids)
    put_weights(built, tensors, dtype, head.folder)
    return built


def needs_shared(described: MedusaDescription) -> bool:
    """Whether the heads use the target's output layer."""
    return SHARED_OUTPUT not in described.names


def _names(head: HeadFolder) -> dict[str, str]:
    found: dict[str, str] = {}
    for stored in head.files.headers:
        name = stored.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.\2.", name)
        name = re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)
        name = re.sub(r"^blocks\.(\d+)\.layers\.", r"blocks.\1.", name)
        if name == "lm_head.weight":
            name = SHARED_OUTPUT
        if name.startswith(("blocks.", "lm_heads.")):
            found[name] = stored
    return found


def _token_map(described: MedusaDescription, head: HeadFolder) -> torch.Tensor | None:
    if "token_map" not in head.files.headers:
        return None
    ids = head.files.read({"token_map": "token_map"})["token_map"].long()
    if ids.unique().shape[0] != ids.shape[0] or int(ids.min()) < 0 or int(ids.max()) >= described.vocab_size:
        raise ModelLoadError(
            f"{head.folder}: token_map names a token twice, or one outside the vocabulary of {described.vocab_size}"
        )
    return ids
