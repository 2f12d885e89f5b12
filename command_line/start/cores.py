"""Cores of the workers that share a machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class CorePlan:
    """The cores of each worker; an empty tuple means no pinning."""

    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...]
    """Cores of draft workers that each target uses, too."""


NICENESS = 5
"""Lower priority of a draft worker whose cores a target uses, too: a step waits for the last of its threads."""


def plan_cores(
    cores: Sequence[int],
    num_targets: int,
    num_drafts: int,
    target_threads: int | None = None,
    draft_threads: int | None = None,
    *,
    may_share: bool = True,
    shares_cores: bool = False,
) -> CorePlan:
    """Splits cores between workers: a draft and its target run at the same time, always.

    A draft model is small and gets one core, or `draft_threads`, from the end. Targets share the rest evenly; from four
    cores on one is left to the coordinator. With `target_threads` each target has so many, those of draft workers where
    its own are fewer. shares_cores: targets also use the cores of draft workers in steps that are measured to be faster
    for it. may_share: whether targets can use those of draft workers at all. Too few cores for one each: nobody is
    pinned. Each gets neighbours of `cores`, which are near to one memory (`machine.usable_cores`).
    """
    width = draft_threads or 1
    if len(cores) < num_targets + num_drafts * width:
        return CorePlan(((),) * num_targets, ((),) * num_drafts, ((),) * num_targets)
    ordered = list(cores)
    split = len(ordered) - num_drafts * width
    drafts = tuple(tuple(ordered[split + i * width : split + (i + 1) * width]) for i in range(num_drafts))
    is_roomy = len(ordered) >= 4 and split > num_targets
    rest = ordered[1:split] if is_roomy else ordered[:split]
    share = len(rest) // num_targets
    own = min(share, target_threads or share)
    targets = tuple(tuple(rest[i * share : i * share + own]) for i in range(num_targets))
    missing = max(target_threads - own, 0) if target_threads else len(ordered) if shares_cores else 0
    lent = [[core for draft in drafts[i::num_targets] for core in draft] for i in range(num_targets)]
    return CorePlan(targets, drafts, tuple(tuple(cores[: missing if may_share else 0]) for cores in lent))


class WorkerThreads(NamedTuple):
    """Cores of a worker, and threads of each of its ranks. None leaves a number to the worker."""

    cores: tuple[int, ...]
    num_threads: int | None
    num_threads_beside_draft: int | None = None
    through: tuple[str, ...] = ()  # command that starts it

    @classmethod
    def on(cls, cores: tuple[int, ...], num_ranks: int) -> WorkerThreads:
        """A thread on each core."""
        return cls(cores, max(len(cores) // num_ranks, 1) if cores else None)


def target_threads(plan: CorePlan, num_threads: int | None, num_ranks: int) -> list[WorkerThreads]:
    """Those of every target worker; `num_threads`: in every step, whatever is faster."""
    found = []
    for own, shared in zip(plan.targets, plan.shared, strict=True):
        if num_threads is not None:
            found.append(WorkerThreads((*own, *shared), num_threads))
        elif shared:
            found.append(WorkerThreads((*own, *shared), len(own) + len(shared), len(own)))
        else:
            found.append(WorkerThreads.on(own, num_ranks))
    return found


def draft_threads(plan: CorePlan, num_threads: int | None, num_ranks: int) -> list[WorkerThreads]:
    """Those of every draft worker; `num_threads`: of each, wherever it runs."""
    shared = {core for cores in plan.shared for core in cores}
    nice = ("nice", "-n", str(NICENESS))
    found = []
    for own in plan.drafts:
        threads = WorkerThreads.on(own, num_ranks)
        through = nice if shared.intersection(own) else ()
        found.append(threads._replace(num_threads=num_threads or threads.num_threads, through=through))
    return found
