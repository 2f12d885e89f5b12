"""Pauses between tries, and what is shown meanwhile."""

from __future__ import annotations

import io
import time

import httpx
import pytest
from rich.console import Console

from command_line.fetch.display import TransferDisplay
from command_line.fetch.hub import _wait_s
from command_line.fetch.transfer import pause_s
from outrider.errors import Unavailable


def test_pauses_grow_and_honour_the_server() -> None:
    pauses = [pause_s(number, Unavailable("x", 1.0)) for number in range(1, 10)]
    assert all(2.0 ** (at - 1) / 2 <= pause <= 2.0 ** (at - 1) for at, pause in enumerate(pauses[:5], 1))
    assert max(pauses) <= 30
    assert pause_s(1, Unavailable("x", 120.0)) == 120


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, 1),
        ({"Retry-After": "20"}, 20),
        ({"Retry-After": "100000"}, 300),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 1),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 55),
        ({"RateLimit": '"resolvers";r=9;t=55'}, 1),
    ],
)
def test_a_busy_hub_says_when_to_come_back(headers: dict[str, str], wait_s: float) -> None:
    assert _wait_s(httpx.Response(429, headers=headers)) == wait_s


class TestDisplay:
    def test_a_log_has_lines_with_rates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        log = io.StringIO()
        with TransferDisplay(Console(file=log, width=200)) as display:
            display.begin(4, 2_000_000_000)
            display.advance(1_000_000)
            for now_s in (105.0, 110.0, 111.0, 121.0):  # noqa: B007  the clock reads it
                display.advance(250_000_000)
            display.finished("a")
            display.note("a note")
        assert log.getvalue().splitlines() == [
            "4 files, 2.00 GB",
            "0 of 4 files, 0.50 of 2.00 GB, 50.0 MB/s, 30 s left",
            "0 of 4 files, 1.00 of 2.00 GB, 47.6 MB/s, 21 s left",
            "a note",
        ]

    def test_a_terminal_has_a_bar(self) -> None:
        shown = io.StringIO()
        with TransferDisplay(Console(file=shown, width=120, force_terminal=True)) as display:
            display.begin(2, 100_000_000)
            display.advance(50_000_000)
            display.finished("a")
            display.note("a note")
        assert "1 of 2 files" in shown.getvalue()
        assert "50.0/100.0 MB" in shown.getvalue()
        assert "a note" in shown.getvalue()
