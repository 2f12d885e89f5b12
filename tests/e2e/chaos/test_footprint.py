"""Tests of what the chaos suite counts as a leak, and of what may come and go."""

from __future__ import annotations

from tests.e2e.chaos.footprint import DESCRIPTORS_MORE, REDIS_CONNECTIONS_MAX, Footprint, leaks

MIB = 1 << 20


def holding(num_descriptors: int, mib: int, keys: set[str], name: str = "target-0") -> Footprint:
    return Footprint({name: 1}, {name: num_descriptors}, {name: mib * MIB}, keys)


def test_what_comes_and_goes_is_no_leak() -> None:
    assert not leaks(holding(25, 600, {"a", "or:losses"}), holding(30, 650, {"a", "{or:batch:1}:parts"}))


def test_descriptors_memory_and_keys_are_missed() -> None:
    before = holding(25, 600, {"a", "b"})
    (found,) = leaks(before, holding(60, 600, {"a", "b"}))
    assert "60 file descriptors, 25 before" in found
    (found,) = leaks(before, holding(25, 1200, {"a", "b"}))
    assert "1200 MiB of memory, 600 before" in found
    (found,) = leaks(before, holding(25, 600, {"a", "c"}))
    assert "['c'] more and ['b'] less" in found


def test_connections_to_redis_are_bounded_by_their_pools_and_excuse_no_other_descriptors() -> None:
    def replica(num_others: int, num_to_redis: int) -> Footprint:
        made = holding(num_others + num_to_redis, 600, set())
        made.num_to_redis["target-0"] = num_to_redis
        return made

    before = replica(70, 11)
    assert not leaks(before, replica(70 + DESCRIPTORS_MORE, REDIS_CONNECTIONS_MAX))
    (found,) = leaks(before, replica(71 + DESCRIPTORS_MORE, 11))
    assert f"{71 + DESCRIPTORS_MORE} file descriptors, 70 before" in found
    (found,) = leaks(before, replica(70, REDIS_CONNECTIONS_MAX + 1))
    assert "connections to Redis, more than its pools may have" in found


def test_a_process_that_was_not_there_before_is_not_compared() -> None:
    assert not leaks(holding(25, 600, set()), holding(900, 9000, set(), name="another"))
