"""Times written as text: what a fake target generates, so that whoever reads it knows when it was sent. Pure.

A stamp is `STAMP_CHARS` characters, the digits of a time in units of 0.1 ms. One character is one token, so text and
tokens mean the same, however chunks are joined.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Final

ALPHABET: Final = string.digits + string.ascii_letters + "-_"
STAMP_CHARS: Final = 4
UNIT_S: Final = 1e-4
PERIOD_S: Final = UNIT_S * len(ALPHABET) ** STAMP_CHARS
"""Time after which stamps repeat, about 28 minutes. A delay must be shorter."""
_ROUNDING: Final = 1e-3  # of a unit, for times that are whole units but for their last bit
_VALUES: Final = {character: value for value, character in enumerate(ALPHABET)}


def stamp(now_s: float) -> list[int]:
    """Returns the digits of a time, the highest first; each is an index of `ALPHABET`."""
    number = int(now_s / UNIT_S + _ROUNDING) % len(ALPHABET) ** STAMP_CHARS
    digits = []
    for _ in range(STAMP_CHARS):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(digit)
    return digits[::-1]


def delays_s(text: str, now_s: float) -> Iterator[float]:
    """Yields how long ago each stamp of a text was written, in seconds, by a reader with the same clock. Raises
    ValueError for text that is not whole stamps."""
    if len(text) % STAMP_CHARS or not _VALUES.keys() >= set(text):
        raise ValueError(f"not whole stamps: {text[:40]!r}")
    for start in range(0, len(text), STAMP_CHARS):
        number = 0
        for character in text[start : start + STAMP_CHARS]:
            number = number * len(ALPHABET) + _VALUES[character]
        # A reader that is faster than a unit sees a delay of next to nothing, not of a period.
        yield (now_s - number * UNIT_S + UNIT_S) % PERIOD_S - UNIT_S
