"""How the chaos suite tells a full target from one with room."""

from __future__ import annotations

import pytest

from tests.e2e.chaos.saturation import KV, RUNNING, WAITING, Saturation


def page(running: int, waiting: int, kv: float) -> str:
    values = {RUNNING: running, WAITING: waiting, KV: kv}
    return "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in values.items())


@pytest.mark.parametrize(
    ("running", "waiting", "kv", "shares"),
    [
        (4, 0, 0.5, (1, 0, 0)),
        (3, 0, 0.95, (0, 1, 0)),
        (3, 0, 0.5, (0, 0, 0)),
        (4, 0, 1.0, (1, 1, 1)),
        (3, 1, 0.7, (1, 1, 1)),
    ],
)
def test_slots_are_busy_with_what_waits_for_blocks_too(
    running: int, waiting: int, kv: float, shares: tuple[float, float, float]
) -> None:
    saturation = Saturation(num_slots=4)
    saturation.add(page(running, waiting, kv))
    found = saturation.to_json()
    assert (found["every_slot_busy"], found["kv_full"], found["both"]) == shares


def test_a_target_that_says_nothing_is_not_counted() -> None:
    saturation = Saturation(num_slots=4)
    saturation.add("")
    assert saturation.num_looks == 0
