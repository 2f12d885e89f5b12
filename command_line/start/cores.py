"""Cores of the workers that share a machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CorePlan:
    """The cores of each worker; an empty tuple means no pinning."""

    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]


def plan_cores(cores: Sequence[int], num_targets: int, num_drafts: int) -> CorePlan:
    """Splits cores so that no two workers share one: a draft and its target run at the same time, always.

    A draft model is small and gets one core, from the end. Targets share the rest evenly; from four cores on
    one is left to the coordinator. Too few cores for one each: nobody is pinned. Each gets neighbours of `cores`, which
    are near to one memory (`machine.usable_cores`).
    """
    if len(cores) < num_targets + num_drafts:
        return CorePlan(((),) * num_targets, ((),) * num_drafts)
    ordered = list(cores)
    split = len(ordered) - num_drafts
    drafts = tuple((core,) for core in ordered[split:])
    is_roomy = len(ordered) >= 4 and split > num_targets
    rest = ordered[1:split] if is_roomy else ordered[:split]
    share = len(rest) // num_targets
    targets = tuple(tuple(rest[i * share : (i + 1) * share]) for i in range(num_targets))
    return CorePlan(targets, drafts)
