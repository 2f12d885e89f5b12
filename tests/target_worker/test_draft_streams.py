"""Sessions on a draft worker's stream: each has a channel, and a commit counts only if it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.concurrency.round_robin import RoundRobin
from outrider.hint_service.draft_streams import (
    ENDED_CHANNELS_KEPT,
    MAX_PENDING_COMMITS,
    DraftStream,
    DraftStreams,
)
from outrider.hint_service.session_names import session_id_of, session_name
from outrider.observability.telemetry import TargetMetrics
from protos.outrider.v1 import hints_pb2
from target_worker.messages import CommitPublished, Event, SubscribeDraft, UnsubscribeDraft


class Service:
    """The service with one open stream, and what the scheduler was told."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.metrics = TargetMetrics("demo", "target-0")
        self.streams = DraftStreams(self._submit, self.metrics, vocab_size=16, now=lambda: 0.0)
        self.stream = self.streams._streams[1] = DraftStream(1)

    def _submit(self, event: Event, **_: Any) -> None:
        self.told.append(event)

    def take(self, *subscribe: hints_pb2.Subscribe) -> None:
        list(self.streams._take_frame(hints_pb2.HintFrame(subscribe=subscribe), self.stream))

    def num_commit_bytes(self) -> float:
        labels = {"model_name": "demo", "engine": "target-0"}
        value = self.metrics.registry.get_sample_value("outrider_commit_bytes_total", labels)
        assert value is not None
        return value

    def publish(self, session_id: str, *, is_finished: bool = False) -> int:
        return self.streams.publish(CommitPublished(1, session_name(session_id, ""), 3, [5], True, is_finished))

    def hint(self, channel: int) -> bool:
        """Whether a hint on this channel is passed on; otherwise it is counted as a bad one."""
        num_told = len(self.told)
        nodes = hints_pb2.HintNodes(channel=channel, base_len=1, parent_ids=[0], token_ids=[1])
        list(self.streams._take_frame(hints_pb2.HintFrame(nodes=[nodes]), self.stream))
        return len(self.told) > num_told


@pytest.fixture
def service() -> Service:
    return Service()


def subscribe(session_id: str, channel: int) -> hints_pb2.Subscribe:
    return hints_pb2.Subscribe(session_id=session_id, attachment=1, channel=channel)


def test_a_session_that_loses_its_channel_is_unsubscribed(service: Service) -> None:
    service.take(subscribe("a", 7))
    service.take(subscribe("b", 7))
    kinds = [(type(event), session_id_of(event.session_id)) for event in service.told]  # type: ignore[union-attr]
    assert kinds == [(SubscribeDraft, "a"), (UnsubscribeDraft, "a"), (SubscribeDraft, "b")]
    assert service.publish("a") == 0
    assert service.publish("b") > 0


def test_a_session_that_subscribes_again_keeps_its_channel(service: Service) -> None:
    service.take(subscribe("a", 7))
    service.take(subscribe("a", 7))
    assert [type(event) for event in service.told] == [SubscribeDraft, SubscribeDraft]


class TestEndedSessions:
    """A stream lives as long as its draft worker. What it keeps of sessions that ended is bounded."""

    def test_so_many_channels_are_kept_and_no_more(self, service: Service) -> None:
        for number in range(1, 3 * ENDED_CHANNELS_KEPT):
            name = f"session-{number}"
            service.take(subscribe(name, number))
            if number % 2:
                service.publish(name, is_finished=True)
            else:
                list(service.streams._take_frame(hints_pb2.HintFrame(unsubscribe=[name]), service.stream))
        assert len(service.stream.channels) == ENDED_CHANNELS_KEPT

    def test_a_hint_that_comes_late_is_no_bad_one(self, service: Service) -> None:
        service.take(subscribe("a", 1))
        service.publish("a", is_finished=True)
        assert service.hint(1)
        for number in range(2, 2 + ENDED_CHANNELS_KEPT):
            service.take(subscribe(f"later-{number}", number))
            service.publish(f"later-{number}", is_finished=True)
        assert not service.hint(1)

    def test_a_channel_that_another_session_has_by_now_stays(self, service: Service) -> None:
        service.take(subscribe("a", 1))
        service.publish("a", is_finished=True)
        service.take(subscribe("b", 1))
        for number in range(2, 2 + ENDED_CHANNELS_KEPT):
            service.take(subscribe(f"later-{number}", number))
            service.publish(f"later-{number}", is_finished=True)
        assert service.hint(1)
        assert service.publish("b") > 0


def test_a_commit_that_the_stream_has_no_room_for_is_not_counted(service: Service) -> None:
    service.take(subscribe("a", 7))
    assert all(service.publish("a") for _ in range(MAX_PENDING_COMMITS))
    counted = service.num_commit_bytes()
    assert service.publish("a") == 0
    assert service.stream.is_overrun
    assert service.num_commit_bytes() == counted


async def test_a_connection_without_room_waits_and_is_not_ended() -> None:
    """One with room goes on meanwhile, and flow control holds the rest of the other's on its side."""
    waiting = RoundRobin[Event](8)
    peers: list[str] = []

    def submit(event: Event, *, is_release: bool = False, peer: str | None = None) -> None:
        assert peer is not None
        assert waiting.put(peer, 1, event), "it was asked for room before"
        peers.append(peer)

    streams = DraftStreams(submit, TargetMetrics("demo", "target-0"), 16, lambda: 0.0, waiting.has_room)
    num_read = dict.fromkeys(("flood", "honest"), 0)

    async def frames(name: str) -> AsyncIterator[hints_pb2.HintFrame]:
        for number in range(20):
            num_read[name] += 1
            yield hints_pb2.HintFrame(
                subscribe=[subscribe(f"{number}-{index}", 2 * number + index) for index in range(2)]
            )

    def opened(name: str) -> asyncio.Task[Any]:
        stream, connection = DraftStream(1, name), streams._connections.join(name)
        return asyncio.create_task(streams._read_hints(frames(name), stream, connection))

    flood = opened("flood")
    while waiting.has_room("flood"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    num_waiting = len(waiting)
    honest = opened("honest")
    while "honest" not in peers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert len(waiting) < 8
    assert peers.count("flood") == num_waiting
    assert num_read["flood"] < 5, "the rest was not read"
    while not (flood.done() and honest.done()):
        waiting.take()
        await asyncio.sleep(0)
    assert (flood.result(), honest.result()) == (None, None), "neither was ended"
    assert peers.count("flood") == peers.count("honest")
