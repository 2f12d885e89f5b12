"""The stranger: told from what a server does, and counted."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.chaos.stranger import Ending, Seen, Stranger, ending_without_exception
from tests.e2e.chaos.stranger_table import StrangerTable

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def asking(*answers: Answer, hung_s: float = 20.0) -> AsyncIterator[Stranger]:
    """A stranger of a server that gives its requests these answers, one after the other, the last one for ever."""
    num_taken = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = [
                int(line.partition(b":")[2])
                for line in head.splitlines()
                if line.lower().startswith(b"content-length:")
            ]
            await reader.readexactly(length)
            num_taken += 1
            await answers[min(num_taken, len(answers)) - 1](writer)
        finally:
            writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        Stranger(f"http://127.0.0.1:{port}", "none", ssl.create_default_context(), hung_s=hung_s) as stranger,
    ):
        yield stranger


def chunk(text: str = "", finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": None,
    }


def usage(num_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    return chunk() | {"choices": [], "usage": counts}


def refused(status: int, code: str, *headers: str) -> Answer:
    body = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": code}}).encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} No", f"Content-Length: {len(body)}", "Connection: close", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return answer


def whole(body: dict[str, Any]) -> Answer:
    text = json.dumps(body)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}".encode()
        )
        await writer.drain()

    return answer


def streamed(*events: dict[str, Any] | str, is_cut: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
        )
        for event in events:
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
            writer.write(f"{len(data):x}\r\n{data}\r\n".encode())
        if not is_cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    return answer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Without a word."""


async def say_nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


COMPLETE = streamed(chunk("a"), chunk("bc", "length"), usage(3), "[DONE]")


async def test_a_stream_with_its_end_and_its_usage_is_complete() -> None:
    async with asking(COMPLETE) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.num_chars, seen.num_tokens, seen.num_tries) == (Ending.COMPLETE, 3, 3, 1)
    assert 0 < seen.longest_wait_s <= seen.ended_s - seen.asked_s


async def test_an_answer_in_one_piece_is_complete() -> None:
    async with asking(whole(chunk("abc", "stop") | {"usage": usage(2)["usage"]})) as stranger:
        seen = await stranger.ask("x", 3, False)
    assert (seen.ending, seen.statuses) == (Ending.COMPLETE, [200])


async def test_a_chat_is_read_alike() -> None:
    def delta(text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
        return chunk() | {"object": "chat.completion.chunk", "choices": [choice]}

    async with asking(streamed(delta("a"), delta("b", "stop"), usage(2), "[DONE]")) as stranger:
        seen = await stranger.ask("x", 3, True, is_chat=True)
    assert (seen.ending, seen.num_chars) == (Ending.COMPLETE, 2)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_what_the_package_tries_again_by_itself_is_counted(is_streaming: bool) -> None:
    last = COMPLETE if is_streaming else whole(chunk("abc", "length") | {"usage": usage(3)["usage"]})
    async with asking(refused(429, "overloaded", "Retry-After-Ms: 1"), hang_up, last) as stranger:
        seen = await stranger.ask("x", 3, is_streaming)
    assert (seen.ending, seen.statuses) == (Ending.COMPLETE, [429, None, 200])


async def test_a_refusal_is_one_after_three_tries() -> None:
    async with asking(refused(503, "unavailable", "Retry-After-Ms: 1")) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.status, seen.code, seen.num_tries) == (Ending.REFUSED, 503, "unavailable", 3)


async def test_a_refusal_that_says_so_is_not_tried_again() -> None:
    async with asking(refused(503, "poisonous_request", "X-Should-Retry: false")) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.num_tries) == (Ending.REFUSED, 1)


async def test_nobody_there_is_no_refusal() -> None:
    async with asking(hang_up) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.statuses) == (Ending.UNANSWERED, [None] * 3)


async def test_a_cut_stream_broke_off_after_what_had_come() -> None:
    async with asking(streamed(chunk("abcd"), is_cut=True)) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.num_chars, seen.is_told, seen.num_tries) == (Ending.BROKEN_OFF, 4, False, 1)


async def test_an_error_in_the_stream_tells_why() -> None:
    error = {"error": {"message": "lost", "type": "t", "param": None, "code": "unavailable"}}
    async with asking(streamed(chunk("abcd"), error, "[DONE]")) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, seen.is_told, seen.code) == (Ending.BROKEN_OFF, True, "unavailable")


@pytest.mark.parametrize(
    "events",
    [
        [chunk("abc")],
        [chunk("abc"), "[DONE]"],
        [chunk("abc", "length"), "[DONE]"],
        [chunk("abc", "length"), usage(2), "[DONE]"],
        [chunk("a"), chunk("b"), chunk("c", "stop"), usage(2), "[DONE]"],
    ],
    ids=["no end", "no finish reason", "no usage", "fewer than asked for", "fewer than came"],
)
async def test_what_ends_without_an_exception_and_is_not_whole_is_silently_short(events: list[Any]) -> None:
    async with asking(streamed(*events)) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert (seen.ending, bool(seen.detail)) == (Ending.SILENTLY_SHORT, True)


async def test_who_says_nothing_is_hung() -> None:
    async with asking(say_nothing, hung_s=0.3) as stranger:
        seen = await stranger.ask("x", 3, True)
    assert seen.ending is Ending.HUNG
    assert seen.ended_s - seen.asked_s < 5


async def test_requests_at_once_count_their_own_tries() -> None:
    async with asking(refused(429, "overloaded", "Retry-After-Ms: 1"), COMPLETE) as stranger:
        found = await asyncio.gather(*(stranger.ask("x", 3, True) for _ in range(4)))
    assert sorted(seen.num_tries for seen in found) == [1, 1, 1, 2]


def seen(ending: Ending, *statuses: int | None, wait_s: float = 0.1, **fields: Any) -> Seen:
    return Seen(0.0, ending=ending, statuses=list(statuses), longest_wait_s=wait_s, detail=ending.value, **fields)


def test_the_table_adds_up() -> None:
    table = StrangerTable()
    table.add("target SIGKILL", seen(Ending.COMPLETE, 200))
    table.add("target SIGKILL", seen(Ending.COMPLETE, 503, 200, wait_s=2.5))
    table.add("target SIGKILL", seen(Ending.REFUSED, 503, 503, 503, status=503, code="unavailable"))
    table.add("coordinator SIGKILL", seen(Ending.BROKEN_OFF, 200))
    table.add("coordinator SIGKILL", seen(Ending.BROKEN_OFF, 200, is_told=True))
    table.add("coordinator SIGKILL", seen(Ending.UNANSWERED, None, None, None))
    lines = table.markdown().splitlines()
    assert lines[2] == "| coordinator SIGKILL | 3 | 0 | 0 | 1 | 2 (1) | 0 | 0 | 1, 0 | 100 ms / 100 ms |"
    assert (
        lines[3] == "| target SIGKILL | 3 | 2 | 1 (1 × 503 unavailable) | 0 | 0 (0) | 0 | 0 | 2, 1 | 100 ms / 2.5 s |"
    )
    assert lines[4].startswith("| **all** | 6 | 2 | 1 (1 × 503 unavailable) | 1 | 2 (1) | 0 | 0 | 3, 1 |")
    assert table.to_json()[-1]["num_broken_off"] == 2
    assert table.to_json()[0]["examples"]["broken off"] == ["broken off"] * 2
    assert table.silent == []


def test_what_was_silently_short_is_named() -> None:
    table = StrangerTable()
    for _ in range(7):
        table.add("log disk full", seen(Ending.SILENTLY_SHORT, 200))
    assert table.silent == ["log disk full: 7 silently short, such as: silently short"]
    assert len(table.to_json()[0]["examples"]["silently short"]) == 5


def test_a_stop_may_come_before_all_that_was_asked_for() -> None:
    whole_one = seen(Ending.HUNG, 200, finish_reason="stop", num_tokens=2, num_chunks=2)
    assert ending_without_exception(whole_one, 9) == (Ending.COMPLETE, "")
