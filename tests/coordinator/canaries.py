"""Canaries as a replica hears of them, without Redis."""

from __future__ import annotations

import itertools
from typing import Any, Final

from coordinator.canary.assignment import CanaryDesk
from outrider.canary.plan import ArmChange, ArmName, Canary, CanaryPlan, CanaryState
from outrider.canary.store import CanaryView

CLOCK_MS: Final = 1_000_000
OFF: Final = ArmChange(speculates=False)
NEW_DRAFT: Final = ArmChange(draft_model="new")
SHORT: Final = ArmChange(num_speculative_tokens=3)


def plan_of(change: ArmChange = OFF, **changes: Any) -> CanaryPlan:
    fields: dict[str, Any] = {"canary_id": "abcd1234", "change": change, "share": 0.5}
    return CanaryPlan(**fields | changes)


def hear_of(
    desk: CanaryDesk,
    plan: CanaryPlan | None,
    state: CanaryState = CanaryState.RUNNING,
    *,
    now_s: float = 0.0,
    clock_ms: int = CLOCK_MS,
) -> None:
    """Tells a replica of a canary that began a while ago and has as long to go."""
    canary = None
    if plan is not None:
        begins_ms = 0 if state is CanaryState.WAITING else CLOCK_MS - 100_000
        canary = Canary(plan, state, begins_ms, CLOCK_MS + 100_000)
    desk.learn(CanaryView(clock_ms, canary), now_s)


def key_in(plan: CanaryPlan, arm: ArmName, number: int = 0) -> str:
    """A key whose requests get this arm; another one for each number."""
    keys = (f"somebody {count}" for count in itertools.count())
    return next(itertools.islice((key for key in keys if plan.arm_of(key) is arm), number, None))
