"""This rank's part of a model that transformers has sharded (tensor parallelism, Shoeybi et al. 1909.08053).

transformers loads each rank's shard and nothing more, by the plan of the model's family. Its own forward pass goes
through hooks around the layers. Here plain layers over the local weights replace them, for which the engine has its
batch-invariant forms, and a few layers that communicate with the other ranks:

"colwise"                sharded outputs: a plain layer with fewer of them
"rowwise"                sharded inputs: partial outputs, summed over the ranks in their order (`collectives`)
"colwise_gather_output"  sharded outputs, gathered: those of the output layer by rank 0 alone
"embedding_rowwise"      sharded vocabulary: every row is some rank's, the others add zeros
"moe_tp_experts"         sharded experts with partial outputs: summed once per row (`experts`)

Modules with any other entry in the plan keep the hooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from outrider.engine.kv.kv_plan import UnevenRanksError
from outrider.engine.layers.experts import is_experts
from outrider.engine.layers.plain_linear import linear_of
from outrider.engine.ranks.rank_group import RankGroup

KEPT: Final = "replicate"  # transformers' name for what every rank has whole
# Whole as well; only gradients are summed.
KEPT_FOR_GRADIENTS: Final = ("mla_kv_a_proj", "replicated_with_grad_allreduce")


class SummedLinear(nn.Module):
    """Linear layer with sharded inputs. The bias is added once, to the sum."""

    def __init__(self, linear: nn.Module, bias: torch.Tensor | None, group: RankGroup, *, splits_input: bool) -> None:
        """cuts_input: whether it takes the whole input and selects its part."""
        super().__init__()
        self.linear, self.bias, self._group, self._splits_input = linear, bias, group, splits_input

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._splits_input:
            inputs = inputs.tensor_split(self._group.size, dim=-1)[self._group.rank]
        total = self._group.sum(self.linear(inputs))
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Module):
    """Linear layer with sharded outputs. Every rank returns them whole, or rank 0 alone."""

    def __init__(self, linear: nn.Module, widths: list[int], group: RankGroup, *, to_all: bool) -> None:
        """widths: outputs of each rank."""
        super().__init__()
        self.linear, self._widths, self._group, self._to_all = linear, widths, group, to_all

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.linear(inputs), self._widths, to_all=self._to_all)


class EmbeddingShard(nn.Module):
    """A shard of the vocabulary's embeddings. Other ids give zeros, so that the order of the sum does not matter."""

    def __init__(self, weight: torch.Tensor, first: int, group: RankGroup, scale: torch.Tensor | None = None) -> None:
        """weight: of token ids from `first` on.  # [num_own, width]. scale: of all of them (Gemma)."""
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
    """Changes to the family's plan: with fewer KV heads than ranks, each rank loads all and keeps one
    (`keep_own_heads`)."""
    plan: Mapping[str, str] = getattr(hf_config, "base_model_tp_plan", None) or {}
    num_kv_heads = num_kv_heads_of(hf_config)
    if num_kv_heads % size == 0 or size % num_kv_heads != 0:
        return {}
    return {f"model.{name}": KEPT for name in plan if name.endswith((".k_proj", ".v_proj")) and plan[name] == "colwise"}


def shards_layers(plan: Mapping[str, str]) -> bool:
    """Whether a plan shards layers; some families plan only their output layer, and every rank would have all the
    rest."""
    return any("*" in name for name in plan)


def plan_name(name: str) -> str:
    """The name of a module or parameter in plans: `*` stands for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def num_kv_heads_of(hf_config: Any) -> int:
    """Number of KV heads; that of attention heads if the configuration names none."""
    num_heads: int = hf_config.num_attention_heads
    return getattr(hf_config, "num_key_value_heads", None) or num_heads


def refuse_uneven_heads(hf_config: Any, num_ranks: int) -> None:
    """Raises UnevenRanksError for a number of ranks that cannot share the model's heads."""
    num_heads, num_kv_heads = hf_config.num_attention_heads, num_kv_heads_of(hf_config)
    if num_heads % num_ranks or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        raise UnevenRanksError(
            f"{num_ranks} ranks cannot share {num_heads} attention heads and {num_kv_heads} KV heads: their number "
            "must divide both, or divide the first and be a multiple of the second"
        )


def keep_own_heads(model: nn.Module, group: RankGroup, num_kv_heads: int) -> None:
    """Selects this rank's KV head from projections that `plan_overrides` made every rank load; ranks may share a
    head."""
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
                linear_of(whole.weight[own].clone(), None if whole.bias is None else whole.bias[own].clone()),
            )
        attention.num_key_value_groups = attention.num_key_value_groups * num_kv_heads // group.size  # type: ignore[operator,assignment]


def take_shards(model: Any, group: RankGroup) -> None:
    """Replaces the layers that a loaded model's plan has sharded by plain layers."""
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
    """Takes this rank's part of every expert. Biases of partial sums stay on rank 0 only."""
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
        return SummedLinear(linear_of(weight), bias, group, splits_input=style == "rowwise_split_input")
    linear = linear_of(weight, bias)
    if style == "colwise" or style in KEPT_FOR_GRADIENTS:
        return linear
    if style in ("colwise_gather_output", "colwise_rep"):
        each = -(-module.weight.shape[0] // group.size)
        widths = [min(each, module.weight.shape[0] - each * rank) for rank in range(group.size)]
        return GatheredLinear(linear, widths, group, to_all=not is_output)  # rank 0 alone samples
    raise ValueError(f"its plan shards a layer in a way that is not supported: {style}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
