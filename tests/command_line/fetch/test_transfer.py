"""Pauses between tries."""

from __future__ import annotations

from command_line.fetch.transfer import pause_s
from outrider.errors import Unavailable


def test_pauses_grow_and_honour_the_server() -> None:
    pauses = [pause_s(number, Unavailable("x", 1.0)) for number in range(1, 10)]
    assert all(2.0 ** (at - 1) / 2 <= pause <= 2.0 ** (at - 1) for at, pause in enumerate(pauses[:5], 1))
    assert max(pauses) <= 30
    assert pause_s(1, Unavailable("x", 120.0)) == 120
