"""A Deployment's controller: decides which pods to replace. Pure: counts in, the next step out."""

from __future__ import annotations

from dataclasses import dataclass

from tests.k8s.pods import Object


@dataclass(frozen=True, slots=True)
class Strategy:
    """Limits: pods beyond the wanted number, and pods that may be unavailable."""

    num_wanted: int
    num_surplus_max: int
    num_unavailable_max: int
    is_recreating: bool = False  # all old pods are gone before the first new one
    min_ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Pods that have not been asked to end."""

    num: int
    num_available: int


@dataclass(frozen=True, slots=True)
class Step:
    num_new: int = 0
    num_old_to_end: int = 0
    num_new_to_end: int = 0


def strategy_of(deployment: Object) -> Strategy:
    """Raises ValueError for percentages."""
    spec = deployment["spec"]
    strategy = spec.get("strategy", {})
    rolling = strategy.get("rollingUpdate", {"maxSurge": 1, "maxUnavailable": 0})
    if not all(isinstance(value, int) for value in rolling.values()):
        raise ValueError(f"percentages are not understood here: {rolling}")
    return Strategy(
        spec.get("replicas", 1),
        rolling["maxSurge"],
        rolling["maxUnavailable"],
        strategy.get("type", "RollingUpdate") == "Recreate",
        spec.get("minReadySeconds", 0),
    )


def next_step(strategy: Strategy, new: Counts, old: Counts, num_ending: int) -> Step:
    """num_ending: pods that were asked to end and are still there, which only `Recreate` waits for.

    Unavailable pods are to be ended first.
    """
    wanted = strategy.num_wanted
    if new.num > wanted:
        return Step(num_new_to_end=new.num - wanted)
    if strategy.is_recreating:
        is_free = not old.num and not num_ending
        return Step(num_new=wanted - new.num if is_free else 0, num_old_to_end=old.num)
    room = wanted + strategy.num_surplus_max - new.num - old.num
    num_new = max(0, min(room, wanted - new.num))
    # Broken pods count: they go as soon as there are enough without them.
    num_spare = old.num + new.num_available - (wanted - strategy.num_unavailable_max)
    return Step(num_new=num_new, num_old_to_end=max(0, min(old.num, num_spare)))
