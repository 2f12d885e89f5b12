"""Follows a batch until it ends, and tells how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from command_line.batch.client import BatchClient, ServerBusy
from command_line.client import ApiError

OVER: Final = ("completed", "failed", "expired", "cancelled")
POLL_S: Final = 1.0
AWAY_MAX_S: Final = 300.0
"""How long a server may be away, as while it is replaced, before following it ends."""
_STEP: Final = 0.1  # share of the lines after which a line is printed where there is no terminal


class Pace:
    """The speed of a batch, from the counts seen so far. Pure but for its clock, which is passed in."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def describe(self, batch: dict[str, Any], now_s: float) -> str:
        """Says in a line how far a batch is."""
        counts = batch["request_counts"]
        num_ended, total = counts["completed"] + counts["failed"], counts["total"]
        if not total:
            return f"{batch['status']}"
        text = f"{batch['status']}: {num_ended} of {total} lines"
        if counts["failed"]:
            text += f", {counts['failed']} of them failed"
        if self._first is None:
            self._first = now_s, num_ended
        since_s, before = self._first
        if num_ended > before and now_s > since_s:
            rate = (num_ended - before) / (now_s - since_s)
            text += f", {rate:.1f} per second"
            if num_ended < total:
                text += f", about {_duration((total - num_ended) / rate)} left"
        return text


def share_ended(batch: dict[str, Any]) -> float:
    """The share of a batch's lines that have ended."""
    counts = batch["request_counts"]
    return (counts["completed"] + counts["failed"]) / counts["total"] if counts["total"] else 0.0


async def follow(
    client: BatchClient,
    batch: dict[str, Any],
    update: Callable[[str], None],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the batch when it has ended. `update` gets each state, `note` one now and then. Raises ApiError."""
    pace, noted, seen_s = Pace(), -1.0, time.monotonic()
    while True:
        now_s = time.monotonic()
        text = pace.describe(batch, now_s)
        update(text)
        if share_ended(batch) >= noted + _STEP:
            noted = share_ended(batch)
            note(text)
        if batch["status"] in OVER:
            return batch
        await asyncio.sleep(POLL_S)
        try:
            batch = await client.get(batch["id"])
            seen_s = time.monotonic()
        except (httpx.HTTPError, ServerBusy) as error:
            if time.monotonic() - seen_s > AWAY_MAX_S:
                raise ApiError(f"batch {batch['id']} cannot be followed: {error or type(error).__name__}") from error
            update(f"the server does not answer: {error or type(error).__name__}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
