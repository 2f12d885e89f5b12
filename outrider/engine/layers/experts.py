"""Mixtures of experts whose every row has the same bits in any batch (invariant I2).

transformers' own experts multiply all rows of an expert at once, and their number depends on the batch composition.
Here each expert's two products become layers of their own, in a batch-invariant form (`linear`). Only experts that some
row chose are run, and each row adds up its experts' outputs in the order in which its router named them.

Other modules that multiply by weights of their own, above all routers, run in blocks of a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ExpertsInterface

from outrider.engine.layers.plain_linear import linear_of
from outrider.engine.ranks.rank_group import RankGroup

EXPERTS_NAME: Final = "outrider"
BLOCK_ROWS: Final = 32
DENSE_BLOCK_ROWS: Final = 8  # where all experts see all rows, padding is expensive


class Expert(nn.Module):
    """The two products of one expert."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down


def has_experts(model: nn.Module) -> bool:
    """Whether the model has layers of experts (mixture of experts)."""
    return any(is_experts(module) or _has_weights(module, 3) for module in model.modules())


def split_experts(model: Any, build: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces every expert's products, in place, by layers of their own, built by `build`; the joint weights are
    released."""
    found = [module for module in model.modules() if is_experts(module) and not _is_sharded(module)]
    for module in found:
        module.outrider_experts = nn.ModuleList(Expert(build(up), build(down)) for up, down in _experts_of(module))
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if isinstance(getattr(module, name, None), nn.Parameter):
                delattr(module, name)
    if found:
        model.set_experts_implementation(EXPERTS_NAME)


def _is_sharded(module: nn.Module) -> bool:
    """Whether its weights are still sharded by transformers, by a plan that is not supported here."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def is_experts(module: nn.Module) -> bool:
    """Whether transformers lets the computation of these experts be replaced (`use_experts_implementation`)."""
    return hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate")


def _experts_of(module: Any) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for index in range(getattr(module, first).shape[0]):
        yield _linear_of(module, first, index), _linear_of(module, "down_proj", index)


def _linear_of(module: Any, name: str, index: int) -> nn.Linear:
    weight = getattr(module, name)[index]
    if module.is_transposed:
        weight = weight.t().contiguous()
    bias = getattr(module, f"{name}_bias")[index] if module.has_bias else None
    return linear_of(weight, bias)


def run_experts(
    module: Any,
    hidden_states: torch.Tensor,  # [num_rows, width]
    top_k_index: torch.Tensor,  # [num_rows, top_k]
    top_k_weights: torch.Tensor,  # [num_rows, top_k]
) -> torch.Tensor:
    """Experts function that transformers calls in every layer of experts; returns `[num_rows, width]`."""
    top_k = top_k_index.shape[1]
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    experts, counts = torch.unique_consecutive(chosen, return_counts=True)
    answers = []
    for number, indices in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        expert = module.outrider_experts[number]
        inner = expert.up(hidden_states[indices // top_k])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        answers.append(expert.down(inner))
    joined = torch.cat(answers)
    by_row = torch.empty_like(joined)
    by_row[order] = joined
    if module.has_post_expert_norm:
        by_row = module.post_expert_norm(by_row)
    weighted = (by_row * top_k_weights.reshape(-1, 1)).view(-1, top_k, hidden_states.shape[-1])
    total = weighted[:, 0]
    for choice in range(1, top_k):
        total = total + weighted[:, choice]
    answer = total.to(hidden_states.dtype)
    group: RankGroup | None = getattr(module, "outrider_group", None)  # of a sharded model (`shards`)
    return answer if group is None else group.sum(answer)


class InBlocks:
    """Runs a module's forward pass over `num_rows` rows of its first argument at a time; the last block is padded with
    its first row."""

    def __init__(self, forward: Callable[..., Any], num_rows: int) -> None:
        self._forward, self._num_rows = forward, num_rows

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Takes [num_rows, width] or [1, num_rows, width]; returns the same shape, alone or in a tuple."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        total = rows.shape[0]
        if missing := -total % self._num_rows:
            rows = torch.cat([rows, rows[:1].expand(missing, -1)])
        parts = []
        for block in rows.split(self._num_rows):
            shaped = block if hidden_states.ndim == 2 else block.unsqueeze(0)
            parts.append(self._forward(shaped, *arguments, **options))
        if isinstance(parts[0], torch.Tensor):
            return self._joined(parts, total)
        return tuple(self._joined(each, total) for each in zip(*parts, strict=True))

    def _joined(self, parts: Sequence[torch.Tensor], total: int) -> torch.Tensor:
        dim = 0 if parts[0].shape[0] == self._num_rows else 1
        return torch.cat(list(parts), dim=dim).narrow(dim, 0, total)


def run_in_blocks(model: nn.Module) -> None:
    """Wraps, in place, modules that multiply by their own weights without being linear layers: routers beside experts,
    and mixtures whose experts transformers does not let be replaced."""
    for module in model.modules():
        children = list(module.children())
        if any(_has_weights(child, 3) and not is_experts(child) for child in children):
            module.forward = InBlocks(module.forward, DENSE_BLOCK_ROWS)
        elif any(map(is_experts, children)):
            for child in filter(_is_router, children):
                child.forward = InBlocks(child.forward, BLOCK_ROWS)


def _is_router(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return type(module).forward is not nn.Linear.forward
    return _has_weights(module, 2) and not is_experts(module)


def _has_weights(module: nn.Module, num_dims: int) -> bool:
    return any(parameter.ndim == num_dims for parameter in module.parameters(recurse=False))


ExpertsInterface.register(EXPERTS_NAME, run_experts)
