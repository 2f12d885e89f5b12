"""The stream to a target: when frames leave, and what is said again after it broke."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

import draft_worker.links
from draft_worker.links import TargetLinks
from draft_worker.messages import CommitReceived, Event, LinkOpened, SendHints, Subscribe, Unsubscribe
from outrider.errors import Overloaded
from outrider.hints.hint_tree import Hint
from protos.outrider.v1 import hints_pb2, hints_pb2_grpc
from tests.coordinator.fakes import eventually

WAIT_S = 10.0


class BreakingTarget(hints_pb2_grpc.HintsServicer):
    """Takes one frame with something in it from every stream, then breaks the stream."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[hints_pb2.HintFrame] = asyncio.Queue()

    async def Exchange(
        self, request_iterator: AsyncIterator[hints_pb2.HintFrame], context: Any
    ) -> AsyncIterator[hints_pb2.CommitFrame]:
        yield hints_pb2.CommitFrame()
        async for frame in request_iterator:
            if frame.subscribe or frame.nodes or frame.unsubscribe:
                self.frames.put_nowait(frame)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")


TargetT = TypeVar("TargetT", bound=hints_pb2_grpc.HintsServicer)


@contextlib.asynccontextmanager
async def serving(target: TargetT) -> AsyncIterator[tuple[TargetT, str]]:
    server = grpc.aio.server()
    hints_pb2_grpc.add_HintsServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield target, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_every_new_stream_hears_of_the_session_again() -> None:
    async with serving(BreakingTarget()) as (target, address):
        links: TargetLinks

        def introduce(event: Event, target: str) -> None:
            if isinstance(event, LinkOpened):
                links.put(Subscribe(address, "a", 1, 5))
                links.put(SendHints(address, "a", 1, 5, [Hint(1, 0, 7)]))

        links = TargetLinks(introduce)
        links.join(address, "a")
        try:
            async with asyncio.timeout(WAIT_S):
                for _ in range(4):
                    frame = await target.frames.get()
                    assert [subscribe.session_id for subscribe in frame.subscribe] == ["a"]
                    assert list(frame.nodes[0].token_ids) == [7]
        finally:
            await links.close()


async def test_a_model_thread_that_is_too_far_behind_does_not_end_the_link() -> None:
    async with serving(BreakingTarget()) as (target, address):
        num_refused = 0
        links: TargetLinks

        def refuse_twice(event: Event, target: str) -> None:
            nonlocal num_refused
            if num_refused < 2:
                num_refused += 1
                raise Overloaded("too far behind")
            links.put(Subscribe(address, "a", 1, 5))

        links = TargetLinks(refuse_twice)
        links.join(address, "a")
        try:
            async with asyncio.timeout(WAIT_S):
                frame = await target.frames.get()
            assert frame.subscribe[0].session_id == "a"
            assert num_refused == 2
        finally:
            await links.close()


class TalkingTarget(hints_pb2_grpc.HintsServicer):
    """Sends a commit on the first channel for each position."""

    async def Exchange(self, request_iterator: Any, context: Any) -> Any:
        async for frame in request_iterator:
            for subscribe in frame.subscribe:
                for position in range(5, 305):
                    commit = hints_pb2.SessionCommit(channel=subscribe.channel, from_len=position, token_ids=[1])
                    yield hints_pb2.CommitFrame(commits=[commit])


async def test_a_target_without_room_is_read_later_and_another_meanwhile() -> None:
    async with serving(TalkingTarget()) as (_, full), serving(TalkingTarget()) as (_, other):
        heard: dict[str, list[int]] = {full: [], other: []}
        has_room, links, is_done = {full: False, other: True}, list[TargetLinks](), asyncio.Event()

        def hear(event: Event, target: str) -> None:
            if isinstance(event, LinkOpened):
                links[0].put(Subscribe(target, target, 1, 5))
            elif isinstance(event, CommitReceived):
                assert event.session_id == target
                heard[target].append(event.from_len)
                if len(heard[target]) == 300:
                    is_done.set()

        links.append(TargetLinks(hear, has_room=lambda target: has_room[target]))
        for address in (full, other):
            links[0].join(address, address)
        try:
            async with asyncio.timeout(WAIT_S):
                await is_done.wait()
                assert heard[full] == []
                is_done.clear()
                has_room[full] = True
                await is_done.wait()
            assert heard[full] == heard[other] == list(range(5, 305)), "all of it, and in order"
        finally:
            await links[0].close()


async def test_a_session_that_left_before_the_frame_did_is_not_subscribed_and_hints_nothing() -> None:
    async with serving(BreakingTarget()) as (target, address):
        links: TargetLinks

        def introduce(event: Event, target: str) -> None:
            if isinstance(event, LinkOpened):
                links.put(Subscribe(address, "a", 1, 5))
                links.put(SendHints(address, "a", 1, 5, [Hint(1, 0, 7)]))
                links.put(Unsubscribe(address, "a"))

        links = TargetLinks(introduce)
        links.join(address, "a")
        try:
            async with asyncio.timeout(WAIT_S):
                frame = await target.frames.get()
            assert not frame.subscribe
            assert not frame.nodes
            assert list(frame.unsubscribe) == ["a"]
        finally:
            await links.close()


async def test_after_a_break_hints_wait_until_the_target_has_heard_of_their_session_again() -> None:
    async with serving(BreakingTarget()) as (target, address):
        links: TargetLinks
        num_streams = 0

        def introduce(event: Event, target: str) -> None:
            nonlocal num_streams
            if isinstance(event, LinkOpened):
                num_streams += 1
                links.put(SendHints(address, "a", 1, 5, [Hint(1, 0, 7)]))  # begun before the break
                links.put(Subscribe(address, "a", 1, 5))

        links = TargetLinks(introduce)
        links.join(address, "a")
        try:
            async with asyncio.timeout(WAIT_S):
                for _ in range(2):
                    frame = await target.frames.get()
                    assert [subscribe.session_id for subscribe in frame.subscribe] == ["a"]
                    assert not frame.nodes
            assert num_streams >= 2
        finally:
            await links.close()


class ListeningTarget(hints_pb2_grpc.HintsServicer):
    """Speaks as after three steps, then takes every frame."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[hints_pb2.HintFrame] = asyncio.Queue()

    async def Exchange(
        self, request_iterator: AsyncIterator[hints_pb2.HintFrame], context: Any
    ) -> AsyncIterator[hints_pb2.CommitFrame]:
        for _ in range(3):
            yield hints_pb2.CommitFrame(commits=[hints_pb2.SessionCommit()])
            await asyncio.sleep(0.02)
        async for frame in request_iterator:
            if frame.ping:
                yield hints_pb2.CommitFrame(pong=frame.ping)
            if frame.subscribe or frame.nodes:
                self.frames.put_nowait(frame)


@pytest.mark.parametrize("share", [0.25, 1e6], ids=["a quarter of a step", "hours"])
async def test_hints_that_are_not_urgent_wait_for_company_but_not_for_ever(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_worker.links, "GATHERING_SHARE", share)

    def hints(node_id: int, *, is_urgent: bool) -> SendHints:
        return SendHints(address, "a", 1, 5, [Hint(node_id, node_id - 1, 7)], is_urgent=is_urgent)

    async with serving(ListeningTarget()) as (target, address):
        is_open = asyncio.Event()
        links = TargetLinks(lambda *_: is_open.set())
        links.join(address, "a")
        try:
            async with asyncio.timeout(WAIT_S):
                await is_open.wait()
                links.put(Subscribe(address, "a", 1, 5))
                links.put(hints(1, is_urgent=True))
                await target.frames.get()  # by then it has spoken
                links.put(hints(2, is_urgent=False))
                links.put(hints(3, is_urgent=False))
                if share > 1:
                    await asyncio.sleep(0.1)
                    assert target.frames.empty()
                    links.put(hints(4, is_urgent=True))
                nodes = (await target.frames.get()).nodes
                assert sum(len(each.token_ids) for each in nodes) == (3 if share > 1 else 2)
        finally:
            await links.close()


@pytest.mark.thorough
async def test_the_round_trip_to_a_target_is_measured() -> None:
    async with serving(ListeningTarget()) as (_, address):
        links = TargetLinks(lambda *_: None)
        links.join(address, "a")
        try:
            links.put(Subscribe(address, "a", 1, 5))
            await eventually(lambda: bool(links.distances.record_text()), "a ping is answered")
            assert links.distances.record_text().startswith(f"{address}=")
        finally:
            await links.close()
