"""Frames between an engine and its hint server arrive whole, however the bytes are cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.frames import MAX_FRAME_BYTES, BadFrame, FrameKind, FrameReader, moment, pack, time_number

FRAMES = st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300), st.integers(0, (1 << 32) - 1))


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_as_they_were_sent(sent: list[tuple[FrameKind, bytes, int]], cuts: list[int]) -> None:
    data = b"".join(pack(kind, body, number) for kind, body, number in sent)
    reader, received, start, turn = FrameReader(), [], 0, 0
    while start < len(data):
        end = start + cuts[turn % len(cuts)]
        reader.feed(data[start:end])
        received += list(reader.frames())
        start, turn = end, turn + 1
    assert received == [(kind, number, body) for kind, body, number in sent]
    assert reader.num_buffered == 0


def test_a_limit_leaves_the_rest() -> None:
    reader = FrameReader()
    reader.feed(pack(FrameKind.HINTS, b"a") + pack(FrameKind.HINTS, b"b"))
    assert [body for _, _, body in reader.frames(1)] == [b"a"]
    assert [body for _, _, body in reader.frames()] == [b"b"]


@given(st.floats(0.0, 1e8), st.floats(0.0, 1000.0))
def test_a_frame_says_when_it_was_sent(at: float, age_s: float) -> None:
    assert moment(time_number(at), at + age_s) == pytest.approx(at, abs=1e-5)


def test_a_moment_that_is_to_come_counts_as_now() -> None:
    assert moment(time_number(100.0), 99.0) == 99.0


@pytest.mark.parametrize("header", [(5, 77, 0), (MAX_FRAME_BYTES + 1, 2, 0), (0, 0, 0)])
def test_what_is_no_frame_is_refused(header: tuple[int, int, int]) -> None:
    reader = FrameReader()
    reader.feed(struct.pack("<IBI", *header))
    with pytest.raises(BadFrame):
        list(reader.frames())
