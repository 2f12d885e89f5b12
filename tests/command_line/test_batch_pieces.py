"""Large files are cut into pieces without losing, repeating or changing a line."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line.batch.pieces import LINE_BYTES_MAX, Piece, batches_of, cut, left_of, lines_of
from outrider.errors import InvalidRequest

LINES = st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=12)


@given(lines=LINES, ends_with_newline=st.booleans(), piece_bytes=st.integers(1, 30))
def test_every_line_is_in_one_piece(lines: list[bytes], ends_with_newline: bool, piece_bytes: int) -> None:
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    pieces = cut("f", len(content), piece_bytes)
    assert [piece.start for piece in pieces] == list(range(0, len(content), piece_bytes))
    found = [line for piece in pieces for line in lines_of(io.BytesIO(content), piece)]
    assert found == [line + b"\n" for line in content.split(b"\n") if line.strip()]


@given(num=st.integers(0, 20), lines_max=st.integers(1, 7))
def test_batches_have_so_many_lines_at_most(num: int, lines_max: int) -> None:
    lines = [b"%d\n" % number for number in range(num)]
    batches = list(batches_of(iter(lines), lines_max))
    assert list(itertools.chain.from_iterable(batches)) == lines
    assert all(len(batch) == lines_max for batch in batches[:-1])
    assert all(batches)


def test_a_line_without_an_end_is_refused_with_its_place() -> None:
    file = io.BytesIO(b"short\n" + b"x" * (LINE_BYTES_MAX + 1))
    with pytest.raises(InvalidRequest, match="byte 6 "):
        list(lines_of(file, Piece("f", 0, 100)))


def test_lines_without_an_answer_are_left() -> None:
    lines = [b'{"custom_id": "%d"}\n' % number for number in range(4)]
    answers = [b'{"custom_id": "1", "error": null}\n', b'{"custom_id": "3", "error": null}\n']
    assert left_of(lines, answers) == [lines[0], lines[2]]
    assert left_of([b"no JSON\n"], []) == [b"no JSON\n"]
