"""How many sequences of each model a replica takes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.service.active_sequences import ActiveSequences

MODELS = ("a", "b", "c")


def three() -> tuple[str, ...]:
    return MODELS


def test_the_only_model_may_have_all() -> None:
    active = ActiveSequences(10)
    for _ in range(10):
        assert active.excess("a", 1, lambda: ["a"]) == 0
        active.add("a", 1)
    assert active.excess("a", 3, lambda: ["a"]) == 3
    assert active.num == 10


def test_a_model_leaves_the_others_their_part_and_has_its_own() -> None:
    active = ActiveSequences(12)  # 2 are kept for each of three
    active.add("a", 8)
    assert active.excess("a", 1, three) == 1
    assert active.excess("b", 2, three) == 0
    active.add("b", 2)
    assert active.excess("b", 1, three) == 1, "beyond its part it takes what is kept for c"
    active.remove("a", 1)
    assert active.excess("b", 1, three) == 0
    active.add("b", 1)
    assert active.excess("c", 2, three) == 0


@pytest.mark.parametrize("num", [5, 500])
def test_a_request_that_is_larger_than_the_limit_is_served_alone(num: int) -> None:
    active = ActiveSequences(4)
    assert active.excess("a", num, three) == 0
    active.add("a", num)
    assert active.excess("b", 1, three) == num - 3


@given(st.integers(1, 60), st.lists(st.tuples(st.sampled_from(MODELS), st.integers(1, 4), st.booleans()), max_size=80))
def test_no_order_of_arrivals_takes_a_models_part_or_goes_beyond_the_limit(
    num_max: int, events: list[tuple[str, int, bool]]
) -> None:
    active, held = ActiveSequences(num_max), dict.fromkeys(MODELS, 0)
    for model, num, is_arrival in events:
        if is_arrival and active.num and not active.excess(model, num, three):
            active.add(model, num)
            held[model] += num
        elif is_arrival and not active.num and num == 1:
            active.add(model, 1)
            held[model] += 1
        elif not is_arrival and held[model] >= num:
            active.remove(model, num)
            held[model] -= num
        assert active.num <= num_max
        for other in MODELS:
            if active.num and (left := num_max // 6 - held[other]) > 0:
                assert active.excess(other, left, three) == 0
