"""How long a request looks for a target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.recovery.retry_policy import RetryPolicy


def test_before_the_first_token_targets_that_had_the_request_count() -> None:
    policy = RetryPolicy(attempts_max=3, wait_max_s=60)
    assert [policy.permits_another(0, 0, found_target=True, uses_attempt=True) for _ in range(3)] == [
        True,
        True,
        False,
    ]


@given(st.lists(st.booleans(), max_size=30))
def test_targets_that_never_had_it_do_not(sent: list[bool]) -> None:
    policy = RetryPolicy(attempts_max=3, wait_max_s=60)
    for number, counts in enumerate(sent, 1):
        permitted = policy.permits_another(0, 0, found_target=True, uses_attempt=counts)
        assert permitted == (sum(sent[:number]) < 3)


def test_where_there_is_no_target_it_ends() -> None:
    assert not RetryPolicy(attempts_max=3, wait_max_s=60).permits_another(0, 0, found_target=False, uses_attempt=False)


def test_with_a_token_only_time_without_another_one_counts() -> None:
    policy = RetryPolicy(attempts_max=3, wait_max_s=60)
    for at_s in range(59):
        assert policy.permits_another(at_s, 1, found_target=at_s % 2 == 0, uses_attempt=True)
    assert policy.permits_another(59, 2, found_target=True, uses_attempt=True)
    assert policy.permits_another(118, 2, found_target=True, uses_attempt=True)
    assert not policy.permits_another(119, 2, found_target=True, uses_attempt=True)
