"""Times written as text tell whoever reads them how long ago that was."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.shared.step_stamps import ALPHABET, PERIOD_S, STAMP_CHARS, UNIT_S, delays_s, stamp


def written(now_s: float) -> str:
    return "".join(ALPHABET[digit] for digit in stamp(now_s))


@pytest.mark.parametrize("sent_s", [0.0, 1.0, 12_345.6789, PERIOD_S - UNIT_S, 3 * PERIOD_S + 0.5])
@pytest.mark.parametrize("delay_s", [0.0, 0.004, 30.0])
def test_a_reader_finds_the_delay_whatever_the_clock_shows(sent_s: float, delay_s: float) -> None:
    assert list(delays_s(written(sent_s), sent_s + delay_s)) == [pytest.approx(delay_s, abs=UNIT_S)]


def test_joined_chunks_have_the_stamps_of_both() -> None:
    text = written(10.0) + written(10.25)
    assert len(text) == 2 * STAMP_CHARS
    assert list(delays_s(text, 10.5)) == [pytest.approx(0.5, abs=UNIT_S), pytest.approx(0.25, abs=UNIT_S)]


def test_no_two_moments_within_the_period_look_alike() -> None:
    texts = [written(number * UNIT_S) for number in range(5000)]
    assert all(first != second for first, second in itertools.pairwise(texts))
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("text", ["abc", "abcd\ufffd", "ab d"])
def test_what_is_no_stamp_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not whole stamps"):
        list(delays_s(text, 1.0))
