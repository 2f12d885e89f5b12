"""How long a request looks for a target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.patience import Patience


def test_before_the_first_token_targets_that_had_the_request_count() -> None:
    patience = Patience(attempts_max=3, wait_max_s=60)
    assert [patience.lasts(0, 0, found_target=True, counts=True) for _ in range(3)] == [True, True, False]


@given(st.lists(st.booleans(), max_size=30))
def test_targets_that_never_had_it_do_not(sent: list[bool]) -> None:
    patience = Patience(attempts_max=3, wait_max_s=60)
    for number, counts in enumerate(sent, 1):
        lasts = patience.lasts(0, 0, found_target=True, counts=counts)
        assert lasts == (sum(sent[:number]) < 3)


def test_where_there_is_no_target_it_ends() -> None:
    assert not Patience(attempts_max=3, wait_max_s=60).lasts(0, 0, found_target=False, counts=False)


def test_with_a_token_only_time_without_another_one_counts() -> None:
    patience = Patience(attempts_max=3, wait_max_s=60)
    for at_s in range(59):
        assert patience.lasts(at_s, 1, found_target=at_s % 2 == 0, counts=True)
    assert patience.lasts(59, 2, found_target=True, counts=True)
    assert patience.lasts(118, 2, found_target=True, counts=True)
    assert not patience.lasts(119, 2, found_target=True, counts=True)
