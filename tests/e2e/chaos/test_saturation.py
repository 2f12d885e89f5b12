"""How the chaos suite tells a full target from one with room."""

from __future__ import annotations

import pytest

from tests.e2e.chaos.saturation import KV, RUNNING, WAITING, Saturation


def page(running: int, kv: float) -> str:
    values = {RUNNING: running, WAITING: 0, KV: kv}
    return "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in values.items())


@pytest.mark.parametrize(
    ("running", "kv", "shares"),
    [(4, 0.5, (1, 0, 1)), (3, 0.95, (0, 1, 1)), (3, 0.5, (0, 0, 0)), (4, 1.0, (1, 1, 1))],
)
def test_a_target_is_full_when_its_slots_or_its_blocks_are(
    running: int, kv: float, shares: tuple[float, float, float]
) -> None:
    saturation = Saturation(num_slots=4)
    saturation.add(page(running, kv))
    found = saturation.to_json()
    assert (found["every_slot_busy"], found["kv_full"], found["no_room"]) == shares


def test_a_target_that_says_nothing_is_not_counted() -> None:
    saturation = Saturation(num_slots=4)
    saturation.add("")
    assert saturation.num_looks == 0
