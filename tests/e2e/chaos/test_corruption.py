"""Damage always changes something, and comes in every kind."""

from __future__ import annotations

from random import Random

from tests.e2e.chaos.corruption import NUM_BYTES_MAX, damage, damaged


def test_what_is_damaged_is_another_value() -> None:
    rng = Random(1)
    for value in (b"", b"0", b"127.0.0.1:7000", bytes(range(256))):
        found = [damaged(value, rng) for _ in range(300)]
        assert value not in found
        assert all(len(each) <= max(len(value), NUM_BYTES_MAX) + 1 for each in found)


def test_a_value_is_cut_short_made_up_or_changed_in_places() -> None:
    value, rng = b"0123456789" * 10, Random(1)
    found = [damaged(value, rng) for _ in range(100)]
    assert any(value.startswith(each) for each in found)
    assert any(len(each) == len(value) for each in found)
    assert any(each and each[:1] not in value for each in found)


def test_any_field_may_be_hit_and_some_go() -> None:
    rng = Random(1)
    fields = {b"kind": b"grpc", b"seed": b"7", b"0:0": b"AAAA"}
    found = [damage(fields, rng) for _ in range(200)]
    assert {name for name, _ in found} == set(fields)
    assert {name for name, value in found if value is None} == set(fields)
    assert all(value != fields[name] for name, value in found)
