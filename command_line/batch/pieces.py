"""Cuts large files of requests into pieces, each of which becomes a batch.

A piece has the lines that begin in a range of bytes of one file. Its content follows from the file alone, so another
run of the same files finds the batches of the first by their content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from outrider.errors import InvalidRequest

PIECE_BYTES: Final = 16 << 20
LINES_MAX: Final = 50_000
"""Most lines of a batch, as at OpenAI: a piece with more becomes several."""
LINE_BYTES_MAX: Final = 8 << 20
"""Most bytes of a line, as the server permits."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The lines of a file that begin in [start, end), in bytes."""

    path: str
    start: int
    end: int


def cut(path: str, num_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Cuts a file into pieces; an empty one has none."""
    return [
        Piece(path, start, min(start + piece_bytes, num_bytes)) for start in range(0, num_bytes, piece_bytes)
    ]  # fmt: skip


def lines_of(file: BinaryIO, piece: Piece) -> Iterator[bytes]:
    """The lines of a piece, each with its newline, without blank ones. Raises InvalidRequest for one without an end."""
    place = piece.start
    if place:  # a line begins after a newline; what began before is the piece before's
        file.seek(place - 1)
        place += len(_read_line(file, place - 1)) - 1
    while place < piece.end:
        line = _read_line(file, place)
        if not line:
            return
        place += len(line)
        if line.strip():
            yield line if line.endswith(b"\n") else line + b"\n"


def batches_of(lines: Iterator[bytes], lines_max: int = LINES_MAX) -> Iterator[list[bytes]]:
    """Lines as batches may have them."""
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) == lines_max:
            yield batch
            batch = []
    if batch:
        yield batch


def left_of(lines: Sequence[bytes], answers: Iterable[bytes]) -> list[bytes]:
    """The lines that have no answer among these, by their `custom_id`; all without answers."""
    answered = {json.loads(answer)["custom_id"] for answer in answers}
    return [line for line in lines if json.loads(line)["custom_id"] not in answered] if answered else list(lines)


def _read_line(file: BinaryIO, place: int) -> bytes:
    line = file.readline(LINE_BYTES_MAX + 1)
    if len(line) > LINE_BYTES_MAX:
        raise InvalidRequest(None, f"the line at byte {place} has more than {LINE_BYTES_MAX} bytes, the most permitted")
    return line
