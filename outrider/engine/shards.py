"""This rank's part of a model that transformers has cut (tensor parallelism, Shoeybi et al. 1909.08053).

transformers loads every rank's shard and nothing more, by the plan of the model's family. Its own forward pass goes
through hooks around the layers; here they give way to plain layers over the local weights, for which the engine has
its batch-invariant forms, and to a few that talk to the other ranks:

    "colwise"                the outputs are cut: a plain layer with fewer of them
    "rowwise"                the inputs are cut: partial outputs, summed over the ranks in their order (`collectives`)
    "colwise_gather_output"  the outputs are cut, and gathered: those of the output layer by rank 0 alone
    "embedding_rowwise"      the vocabulary is cut: every row is some rank's, the others add zeros
    "moe_tp_experts"         every expert is cut, its answers are partial: summed once per row (`experts`)

What else a plan has keeps the hooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from outrider.engine.experts import is_experts
from outrider.engine.rank_group import RankGroup

KEPT: Final = "replicate"  # transformers' word for what every rank has whole
# Whole as well; only of gradients there is something to be summed.
KEPT_FOR_GRADIENTS: Final = ("mla_kv_a_proj", "replicated_with_grad_allreduce")


class SummedLinear(nn.Module):
    """A layer whose inputs are cut. The bias is added once, to the sum."""

    def __init__(
        self, linear: nn.Module, bias: torch.Tensor | None, group: RankGroup, *, cuts_input: bool
    ) -> None:
        """cuts_input: it is given the whole input and takes its part."""
        super().__init__()
        self.linear, self.bias, self._group, self._cuts_input = linear, bias, group, cuts_input

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._cuts_input:
            inputs = inputs.tensor_split(self._group.size, dim=-1)[self._group.rank]
        total = self._group.sum(self.linear(inputs))
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Module):
    """A layer whose outputs are cut. Every rank returns them whole, or rank 0 alone."""

    def __init__(self, linear: nn.Module, widths: list[int], group: RankGroup, *, to_all: bool) -> None:
        """widths: outputs of each rank."""
        super().__init__()
        self.linear, self._widths, self._group, self._to_all = linear, widths, group, to_all

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.linear(inputs), self._widths, to_all=self._to_all)


class EmbeddingShard(nn.Module):
    """A part of the vocabulary's embeddings. All others' are zeros, so that the order of the sum does not matter."""

    def __init__(
        self, weight: torch.Tensor, first: int, group: RankGroup, scale: torch.Tensor | None = None
    ) -> None:
        """weight: of token ids `first` and following.  # [num_own, width]. scale: of all of them (Gemma)."""
        super().__init__()
        self.weight, self._first, self._group, self._scale = weight, first, group, scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self._first
        is_other = (local < 0) | (local >= self.weight.shape[0])
        rows = self.weight[local.masked_fill(is_other, 0)]
        rows.masked_fill_(is_other.unsqueeze(-1), 0.0)
        distributed.all_reduce(rows, group=self._group.tensors)
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


def plan_overrides(hf_config: Any, size: int) -> dict[str, str]:
    """What differs from the family's plan: of fewer KV heads than ranks each rank loads all and keeps one
    (`keep_own_heads`)."""
    plan: Mapping[str, str] = getattr(hf_config, "base_model_tp_plan", None) or {}
    num_kv_heads = num_kv_heads_of(hf_config)
    if num_kv_heads % size == 0 or size % num_kv_heads != 0:
        return {}
    return {
        f"model.{name}": KEPT
        for name in plan
        if name.endswith((".k_proj", ".v_proj")) and plan[name] == "colwise"
    }


def cuts_layers(plan: Mapping[str, str]) -> bool:
    """Some families have a plan for their output layer alone, and every rank would have all the rest."""
    return any("*" in name for name in plan)


def plan_name(name: str) -> str:
    """A module's or parameter's name as plans have it: `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def num_kv_heads_of(hf_config: Any) -> int:
    num_heads: int = hf_config.num_attention_heads
    return getattr(hf_config, "num_key_value_heads", None) or num_heads


def keep_own_heads(model: nn.Module, group: RankGroup, num_kv_heads: int) -> None:
    """Cuts the KV projections that `plan_overrides` had every rank load: several ranks share a head."""
    head = group.rank * num_kv_heads // group.size
    for attention in model.modules():
        if not hasattr(attention, "k_proj") or not hasattr(attention, "num_key_value_groups"):
            continue
        head_dim: int = attention.head_dim  # type: ignore[assignment]
        own = slice(head * head_dim, (head + 1) * head_dim)
        for name in ("k_proj", "v_proj"):
            whole: nn.Linear = getattr(attention, name)
            setattr(
                attention,
                name,
                _linear(whole.weight[own].clone(), None if whole.bias is None else whole.bias[own].clone()),
            )
        attention.num_key_value_groups = attention.num_key_value_groups * num_kv_heads // group.size  # type: ignore[operator,assignment]


def take_shards(model: Any, group: RankGroup) -> None:
    """Puts plain layers in the place of those that the plan of a loaded model has cut."""
    plan: Mapping[str, str] = model.tp_plan
    output = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        style = plan.get(plan_name(name))
        parent_name, _, own_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(module, nn.Linear) and style is not None and style != KEPT:
            setattr(parent, own_name, _local_linear(module, style, group, is_output=module is output))
        elif isinstance(module, nn.Embedding) and style == "embedding_rowwise":
            weight = module.weight
            assert isinstance(weight, DTensor)
            first = group.rank * -(-weight.shape[0] // group.size)
            scale: torch.Tensor | None = getattr(module, "embed_scale", None)
            setattr(parent, own_name, EmbeddingShard(weight.to_local(), first, group, scale))
        elif style == "moe_tp_experts" and is_experts(module):
            _take_experts(module, group)


def _take_experts(module: Any, group: RankGroup) -> None:
    """This rank's part of every expert. What is added to a sum is added by rank 0."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = _local(parameter)
        if name == "down_proj_bias" and group.rank > 0:
            local = torch.zeros_like(local)
        setattr(module, name, nn.Parameter(local, requires_grad=False))
    module.__dict__.pop("forward", None)  # transformers' hook around the class's own
    module.outrider_group = group


def _local_linear(module: nn.Linear, style: str, group: RankGroup, *, is_output: bool) -> nn.Module:
    weight, bias = _local(module.weight), None if module.bias is None else _local(module.bias)
    if style in ("rowwise", "rowwise_rep", "rowwise_split_input"):
        return SummedLinear(_linear(weight, None), bias, group, cuts_input=style == "rowwise_split_input")
    linear = _linear(weight, bias)
    if style == "colwise" or style in KEPT_FOR_GRADIENTS:
        return linear
    if style in ("colwise_gather_output", "colwise_rep"):
        each = -(-module.weight.shape[0] // group.size)
        widths = [min(each, module.weight.shape[0] - each * rank) for rank in range(group.size)]
        return GatheredLinear(linear, widths, group, to_all=not is_output)  # rank 0 alone samples
    raise ValueError(f"its plan cuts a layer in a way that is not known here: {style}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear
