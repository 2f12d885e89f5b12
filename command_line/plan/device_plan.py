"""The workers that share a device: what they need of it, and whether they would start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import typer

from command_line.plan.gpus import parse_memory
from command_line.plan.head_plan import head_load, with_head
from outrider.engine.kv.kv_plan import DeviceMemory, KvPlan, Load, ModelLoadError, divide, plan_kv
from outrider.engine.loading.machine import machine_memory
from outrider.engine.options import AUTO, EngineOptions

LENGTHS: Final = (1024, 4096, 16_384, 65_536, 131_072)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The plan of all workers that share a device."""

    memory: DeviceMemory
    share: float
    loads: dict[str, Load]  # by role, the target's first
    workers: dict[str, KvPlan]  # likewise; empty where they do not fit
    refusal: str | None

    @property
    def usable(self) -> int:
        return self.memory.usable(self.share)

    @property
    def missing(self) -> int:
        """Bytes that are missing for the models alone, and one token."""
        needed = (each.num_ranks * (each.needs.fixed + each.needs.kv_per_token) for each in self.loads.values())
        return max(sum(needed) - self.usable, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits in every worker: a draft keeps KV for every token that its target keeps."""
        fixed = sum(each.num_ranks * each.needs.fixed for each in self.loads.values())
        per_token = sum(each.num_ranks * each.needs.kv_per_token for each in self.loads.values())
        return max(self.usable - fixed, 0) // per_token

    @property
    def sessions_by_length(self) -> dict[int, int]:
        """Sessions at once, if all are as long."""
        longest = self.workers["target"].max_model_len if self.workers else self.loads["target"].needs.longest
        lengths = sorted({*(each for each in LENGTHS if each < longest), longest})
        return {length: self.num_tokens // length for length in lengths}


def load_of(options: EngineOptions, num_workers: int, num_ranks: int, device_type: str, *, is_shared: bool) -> Load:
    """The ranks of one model's workers on a device, or on a machine that all ranks share. Raises ConfigurationError."""
    from outrider.engine.loading.memory_plan import ServingShape, plan_memory

    needs = plan_memory(options.model, ServingShape.of(options, num_ranks, device_type))
    return Load(needs, options, num_workers * (num_ranks if is_shared else 1))


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of one role."""

    options: EngineOptions
    num_workers: int
    num_ranks: int  # of each


def loads_of(
    target: Workers, draft: Workers | None, head: Path | None, device_type: str, *, is_local: bool, is_shared: bool
) -> dict[str, Load]:
    """All workers by role. `head`: folder of a draft head, which draft workers run where there are some, and the target
    where it `is_local`. Raises ConfigurationError."""

    def load(each: Workers) -> Load:
        return load_of(each.options, each.num_workers, each.num_ranks, device_type, is_shared=is_shared)

    loads = {"target": load(target)}
    if head is not None:
        loads["target"] = with_head(loads["target"], head, is_local=is_local or draft is None)
    if draft is not None:
        is_model = head is None
        loads["draft"] = (
            load(draft) if is_model else head_load(draft.options, target.options.model, draft.num_workers, device_type)
        )
    return loads


def device_memory(device_type: str, given: str | None) -> DeviceMemory:
    """The given memory, or that of the first GPU or this machine."""
    import torch

    if given is not None:
        return DeviceMemory(parse_memory(given), parse_memory(given), is_own=True)
    if device_type == "cpu":
        return machine_memory()
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU here: give its memory with --memory")
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total, free, is_own=True)


def decide(loads: dict[str, Load], memory: DeviceMemory, share: float, device_type: str, *, is_one: bool) -> DevicePlan:
    """As a worker decides that starts alone, or those that `outrider serve` starts on this device together."""
    workers: dict[str, KvPlan] = {}
    try:
        if is_one:
            budgets = [memory.budget(share, loads["target"].num_ranks)]
        else:
            budgets = divide([*loads.values()], memory, share, device_type)
        for (role, each), budget in zip(loads.items(), budgets, strict=True):
            options = each.options
            if workers and options.max_model_len in (None, AUTO):  # no longer than the target's
                options = replace(options, max_model_len=min(each.needs.longest, workers["target"].max_model_len))
            workers[role] = plan_kv(each.needs, budget, options, device_type)
    except ModelLoadError as error:
        return DevicePlan(memory, share, loads, {}, error.message)
    return DevicePlan(memory, share, loads, workers, None)
