"""Frames between an engine and its hint server arrive whole, however the bytes are cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.frames import (
    BYTES_MAX,
    FROM_ENGINE,
    FROM_HINT_SERVER,
    BadFrame,
    FrameKind,
    FrameReader,
    FrameTooLarge,
    moment,
    pack,
    time_number,
)

FRAMES = st.tuples(
    st.sampled_from(sorted(set(FrameKind) - {FrameKind.TAKEN})), st.binary(max_size=300), st.integers(0, (1 << 32) - 1)
)


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


def test_what_is_not_asked_for_is_left() -> None:
    reader = FrameReader()
    reader.feed(pack(FrameKind.HINTS, b"a") + pack(FrameKind.HINTS, b"b"))
    for body in (b"a", b"b"):
        assert reader.has_frame
        assert reader.next() == (FrameKind.HINTS, 0, body)
    assert not reader.has_frame
    assert reader.next() is None


@pytest.mark.parametrize("kind", FrameKind)
def test_the_largest_frame_of_each_kind_is_held_and_nothing_larger_is_made(kind: FrameKind) -> None:
    """The frame is split anywhere in its head; `test_hint_link` has every split for the engine's end."""
    frame = pack(kind, bytes(BYTES_MAX[kind]), 7)
    with pytest.raises(FrameTooLarge, match=f"{kind.name} with {BYTES_MAX[kind] + 1} bytes"):
        pack(kind, bytes(BYTES_MAX[kind] + 1))
    for split in {*range(min(20, len(frame))), len(frame) // 2, len(frame) - 1}:
        reader = FrameReader({kind})
        reader.feed(frame[:split])
        assert reader.next() is None
        assert [reader.has_frame, reader.room] == [False, len(frame) - split]
        reader.feed(frame[split:])
        assert reader.has_frame
        assert reader.next() == (kind, 7, bytes(BYTES_MAX[kind]))


@pytest.mark.parametrize("kinds", [FROM_ENGINE, FROM_HINT_SERVER])
def test_while_there_is_no_frame_there_is_room_to_read_on(kinds: frozenset[FrameKind]) -> None:
    largest = max(kinds, key=lambda kind: BYTES_MAX[kind])
    data = pack(largest, bytes(BYTES_MAX[largest])) * 2
    reader, num_frames = FrameReader(kinds), 0
    while num_frames < 2:
        assert reader.room > 0
        part, data = data[: reader.room], data[reader.room :]
        reader.feed(part)
        num_frames += len(list(reader.frames()))
    assert not data


def test_a_peer_sends_its_own_kinds_alone() -> None:
    reader = FrameReader(FROM_HINT_SERVER)
    reader.feed(pack(FrameKind.OPEN, b""))
    assert reader.has_frame
    with pytest.raises(BadFrame, match="may not send"):
        reader.next()


@given(st.floats(0.0, 1e8), st.floats(0.0, 1000.0))
def test_a_frame_says_when_it_was_sent(at: float, age_s: float) -> None:
    assert moment(time_number(at), at + age_s) == pytest.approx(at, abs=1e-5)


def test_a_moment_that_is_to_come_counts_as_now() -> None:
    assert moment(time_number(100.0), 99.0) == 99.0


@pytest.mark.parametrize("header", [(5, 77, 0), (BYTES_MAX[FrameKind.OPEN] + 1, 2, 0), (0, 0, 0)])
def test_what_is_no_frame_is_refused(header: tuple[int, int, int]) -> None:
    reader = FrameReader()
    reader.feed(struct.pack("<IBI", *header))
    with pytest.raises(BadFrame):
        list(reader.frames())
