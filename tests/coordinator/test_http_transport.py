"""Event streams whose client leaves at a bad moment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from coordinator.api.http.http_transport import EventStream


async def test_a_stream_that_is_cancelled_twice_ends_what_it_is_made_from_first() -> None:
    """Found: Serve cancelled once more while the stream was ending, and "asynchronous generator is already running" was
    logged as a failure of the request."""
    ending = asyncio.Event()
    begun = asyncio.Event()
    ended: list[str] = []

    async def source() -> AsyncGenerator[str]:
        try:
            yield "x"
            begun.set()
            await asyncio.sleep(60)
        finally:
            ending.set()
            for _ in range(10):  # as a call to a worker takes a moment to be cancelled
                await asyncio.sleep(0)
            ended.append("source")

    async def events(items: AsyncGenerator[str]) -> AsyncGenerator[str]:
        try:
            async for item in items:
                yield item
        finally:
            ended.append("events")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None: ...

    items = source()
    answering = asyncio.create_task(EventStream(events(items), items)({"type": "http"}, receive, send))
    async with asyncio.timeout(30):
        await begun.wait()
        answering.cancel()
        await ending.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
    assert ended == ["source", "events"]


def test_a_body_is_read_without_opening_a_file() -> None:
    """Found: the first body that a replica read loaded a codec, and where it had no descriptor left that was a 500."""
    code = (
        "import sys, coordinator.api.schema.openai_schema as schema\n"
        "known = set(sys.modules)\n"
        'for raw in (b\'{"a": 1}\', b\'\\xef\\xbb\\xbf{"a": "\\\\ud83d\\\\ude00"}\'):\n'
        "    schema._read_object(raw)\n"
        "print(sorted(set(sys.modules) - known))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
