"""A hint stream from end to end: what the draft worker's links say is what the target worker's face understands.

Both are real, with a stream between them; the scheduler on the one side and the model thread on the other are played.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from draft_worker import messages as draft
from draft_worker.links import NUM_CHANNELS, TargetLinks
from outrider.grammar import GrammarCompiler
from outrider.hint_service.draft_streams import MAX_CHANNEL
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.observability.telemetry import TargetMetrics
from outrider.worker.session_checks import SESSION_ID_CHARS_MAX
from protos.outrider.v1 import common_pb2, hints_pb2, hints_pb2_grpc
from target_worker import messages as target
from target_worker.serving.server import TargetServicer

WAIT_S = 10.0
VOCAB_SIZE = 100


class Target:
    """A target worker's face that notes the events it would hand to its model thread."""

    def __init__(self) -> None:
        self.metrics = TargetMetrics("tiny", "target")
        grammars = GrammarCompiler(Path("none"), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
        self.servicer = TargetServicer(common_pb2.WorkerInfo(vocab_size=VOCAB_SIZE), self.metrics, grammars)
        self.servicer.bind(self)  # type: ignore[arg-type]
        self.events: list[target.Event] = []
        self._changed = asyncio.Event()
        self.address = ""

    def submit(self, event: target.Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        self.events.append(event)
        self._changed.set()
        return True

    def has_room(self, peer: str) -> bool:
        return True

    async def until(self, is_enough: Callable[[], bool]) -> None:
        """Waits for events; shows what came when they do not suffice."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not is_enough():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"after {WAIT_S} s there was no more than {self.events}") from None

    def hints(self, session_id: str | None = None) -> list[tuple[str, int, int, Hint]]:
        return [
            (event.session_id, event.attachment, event.base_len, hint)
            for event in self.events
            if isinstance(event, target.HintsArrived) and session_id in (None, event.session_id)
            for hint in event.hints
        ]

    def subscriptions(self) -> list[str]:
        return [event.session_id for event in self.events if isinstance(event, target.SubscribeDraft)]

    @property
    def num_bad(self) -> float:
        labels = {"model_name": "tiny", "engine": "target"}
        return self.metrics.registry.get_sample_value("outrider_bad_hint_messages_total", labels) or 0.0


@contextlib.asynccontextmanager
async def running_target(port: int = 0) -> AsyncIterator[Target]:
    server, made = grpc.aio.server(), Target()
    hints_pb2_grpc.add_HintsServicer_to_server(made.servicer.hints, server)
    made.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(None)


class Speaker:
    """Plays the draft scheduler: subscribes its sessions on every new stream, and says their hints."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.links = TargetLinks(self.hear)
        self.attachments: dict[str, int] = {}
        self.said: list[tuple[str, int, int, Hint]] = []
        self.num_opened = 0

    def hear(self, event: draft.Event, target: str) -> None:
        if isinstance(event, draft.LinkOpened):
            self.num_opened += 1
            for session_id in self.attachments:
                self.subscribe(session_id)

    def attach(self, session_id: str, attachment: int = 1) -> None:
        self.attachments[session_id] = attachment
        self.links.join(self.address, session_id)
        self.subscribe(session_id)

    def subscribe(self, session_id: str) -> None:
        self.links.put(draft.Subscribe(self.address, session_id, self.attachments[session_id], 5))

    def detach(self, session_id: str) -> None:
        del self.attachments[session_id]
        self.links.leave(self.address, session_id)
        self.links.put(draft.Unsubscribe(self.address, session_id))

    def say(self, session_id: str, base_len: int, hints: list[Hint]) -> None:
        attachment = self.attachments[session_id]
        self.said += [(session_id, attachment, base_len, hint) for hint in hints]
        self.links.put(draft.SendHints(self.address, session_id, attachment, base_len, hints))

    def said_of(self, session_id: str) -> list[tuple[str, int, int, Hint]]:
        return [each for each in self.said if each[0] == session_id]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Target, Speaker]]:
    """The stream is open and nothing was said on it."""
    async with running_target() as made:
        speaker = Speaker(made.address)
        try:
            speaker.attach("first")
            await made.until(lambda: "first" in made.subscriptions())
            yield made, speaker
        finally:
            await speaker.links.close()


async def test_a_link_keeps_nothing_of_sessions_that_left() -> None:
    async with connected() as (made, speaker):

        async def come_and_go(name: str) -> None:
            speaker.attach(name)
            speaker.say(name, 5, [Hint(1, 0, 7)])
            await made.until(lambda: bool(made.hints(name)))
            speaker.detach(name)

        for number in range(50):
            await come_and_go(f"session-{number}")
        link = speaker.links._links[made.address]
        assert len(link._encoders) == len(link._channels) == 1, "that of the first"
        assert made.num_bad == 0


def chain(first_id: int, count: int, parent_id: int = 0) -> list[Hint]:
    return [Hint(first_id + i, first_id + i - 1 if i else parent_id, (first_id + i) % 90) for i in range(count)]


async def test_hints_of_many_sessions_reach_their_own_whatever_is_left_out_of_messages() -> None:
    """Roots that go on, roots that change, ids that continue, jump, and come in no order."""
    async with connected() as (made, speaker):
        rng = random.Random(1)
        names = [f"s{number}" for number in range(5)]
        for name in names:
            speaker.attach(name, rng.randrange(1, 5))
        base_lens, next_ids = dict.fromkeys(names, 5), dict.fromkeys(names, 1)
        for round_number in range(60):
            name = rng.choice(names)
            kind = rng.random()
            if kind < 0.2:
                base_lens[name] += rng.randrange(1, 4)
                next_ids[name] = 1
            elif kind < 0.3:
                next_ids[name] += rng.randrange(1, 4)
            hints = chain(next_ids[name], rng.randrange(1, 4), rng.randrange(next_ids[name]))
            next_ids[name] += len(hints)
            if kind > 0.8:
                hints.append(Hint(next_ids[name] + 5, 0, 7, DraftDistribution((7, 3), (200, 56))))
                next_ids[name] += 6
            if kind > 0.9:
                rng.shuffle(hints)
            speaker.say(name, base_lens[name], hints)
            if round_number % 7 == 0:
                await made.until(lambda: len(made.hints()) == len(speaker.said))  # so that it becomes many frames
        await made.until(lambda: len(made.hints()) == len(speaker.said))
        for name in names:
            assert made.hints(name) == speaker.said_of(name)
        assert made.num_bad == 0


async def test_a_session_that_subscribes_again_on_the_same_stream_is_understood() -> None:
    """As it does when it missed a commit: the target's side of the channel starts anew, and so must ours."""
    async with connected() as (made, speaker):
        speaker.say("first", 5, chain(1, 3))
        await made.until(lambda: len(made.hints()) == 3)
        speaker.subscribe("first")
        await made.until(lambda: len(made.subscriptions()) == 2)
        speaker.say("first", 5, chain(4, 2, 3))
        await made.until(lambda: len(made.hints()) == 5)
        assert made.hints() == speaker.said


async def test_what_follows_a_session_that_left_is_understood() -> None:
    async with connected() as (made, speaker):
        for attachment in range(2, 6):
            speaker.say("first", 5, chain(1, 2))
            speaker.detach("first")
            speaker.attach("first", attachment)
        speaker.say("first", 5, chain(1, 2))
        await made.until(lambda: bool(made.hints()) and made.hints()[-1] == speaker.said[-1])
        assert set(made.hints()) <= set(speaker.said)


async def test_after_a_break_everything_that_is_said_is_understood_again() -> None:
    async with running_target() as made:
        speaker = Speaker(made.address)
        speaker.attach("a")
        speaker.attach("b", 3)
        await made.until(lambda: len(made.subscriptions()) >= 2)
        speaker.say("a", 5, chain(1, 3))
        await made.until(lambda: len(made.hints()) == 3)
    port = int(made.address.rsplit(":", 1)[1])
    speaker.detach("b")  # while there is no stream
    async with running_target(port) as again:
        try:
            await again.until(lambda: "a" in again.subscriptions())
            assert set(again.subscriptions()) == {"a"}
            speaker.attach("c", 2)
            speaker.say("a", 5, chain(4, 2, 3))
            speaker.say("c", 9, chain(1, 2))
            await again.until(lambda: len(again.hints()) == 4)
            assert again.hints("a") == speaker.said_of("a")[3:]
            assert again.hints("c") == speaker.said_of("c")
            assert again.num_bad == 0
        finally:
            await speaker.links.close()


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_session_that_leaves_before_it_was_introduced_does_not_end_the_link(is_open: bool) -> None:
    """Its farewell comes by way of the model thread, later than the caller's own: a frame may leave in between."""
    async with running_target() as made:
        speaker = Speaker(made.address)
        try:
            speaker.attach("stays")
            if is_open:
                await made.until(lambda: "stays" in made.subscriptions())
            speaker.attach("leaves")
            speaker.links.leave(made.address, "leaves")
            del speaker.attachments["leaves"]
            speaker.subscribe("stays")
            await asyncio.sleep(0)
            await made.until(lambda: "stays" in made.subscriptions())
            speaker.say("stays", 5, chain(1, 2))
            await made.until(lambda: len(made.hints()) == 2)
            speaker.links.put(draft.Unsubscribe(made.address, "leaves"))
            speaker.say("stays", 5, chain(3, 1, 2))
            await made.until(lambda: len(made.hints()) == 3)
        finally:
            await speaker.links.close()


class Raw:
    """A stream of frames that nobody checks."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, *nodes: hints_pb2.HintNodes, **columns: Any) -> None:
        await self._call.write(hints_pb2.HintFrame(nodes=nodes, **columns))

    async def read(self) -> list[hints_pb2.SessionCommit]:
        async with asyncio.timeout(WAIT_S):
            return list((await self._call.read()).commits)


@contextlib.asynccontextmanager
async def raw_stream() -> AsyncIterator[tuple[Target, Raw]]:
    async with running_target() as made, grpc.aio.insecure_channel(made.address) as channel:
        call = hints_pb2_grpc.HintsStub(channel).Exchange()
        yield made, Raw(call)
        call.cancel()


def node(channel: int, **columns: Any) -> hints_pb2.HintNodes:
    values: dict[str, Any] = {
        "base_len": 3,
        "first_node_id": 1,
        "parent_ids": [0],
        "token_ids": [7],
    } | columns
    return hints_pb2.HintNodes(channel=channel, **values)


async def test_hints_under_an_unknown_channel_are_counted_and_dropped() -> None:
    async with raw_stream() as (made, raw):
        await raw.write(node(4), node(0), subscribe=[])
        await raw.write(subscribe=[hints_pb2.Subscribe(session_id="a", attachment=1, channel=4)])
        await raw.write(node(5), node(4), node(2**32 - 1))
        await made.until(lambda: len(made.hints()) == 1)
        await raw.write(node(4, first_node_id=2))
        await made.until(lambda: len(made.hints()) == 2)
        assert [hint.node_id for *_, hint in made.hints("a")] == [1, 2]
        assert made.num_bad == 4


async def test_subscriptions_that_make_no_sense_open_no_channel() -> None:
    async with raw_stream() as (made, raw):
        bad = [
            hints_pb2.Subscribe(session_id="", channel=1),
            hints_pb2.Subscribe(session_id="x" * (SESSION_ID_CHARS_MAX + 1), channel=2),
            hints_pb2.Subscribe(session_id="a", channel=MAX_CHANNEL + 1),
        ]
        await raw.write(node(1), node(2), node(MAX_CHANNEL + 1), subscribe=bad)
        await raw.write(node(9), subscribe=[hints_pb2.Subscribe(session_id="b", channel=9)])
        await made.until(lambda: len(made.hints()) == 1)
        assert made.subscriptions() == ["b"]
        assert made.num_bad == 3


async def test_a_message_that_makes_no_sense_does_not_shift_those_after_it() -> None:
    """Fields that later messages omit are not derived from a malformed message."""
    async with raw_stream() as (made, raw):
        subscribe = hints_pb2.Subscribe(session_id="a", attachment=1, channel=4)
        await raw.write(node(4), subscribe=[subscribe])
        await raw.write(node(4, base_len=9, parent_ids=[]))  # columns of different lengths
        await raw.write(hints_pb2.HintNodes(channel=4, parent_ids=[1], token_ids=[8]))
        await made.until(lambda: len(made.hints()) == 2)
        assert made.hints()[1] == ("a", 1, 3, Hint(2, 1, 8))
        assert made.num_bad == 1


async def test_a_channel_that_is_given_again_brings_no_commits_of_its_earlier_session() -> None:
    async with raw_stream() as (made, raw):
        for name in "ab":
            await raw.write(subscribe=[hints_pb2.Subscribe(session_id=name, attachment=1, channel=4)])
        await made.until(lambda: len(made.subscriptions()) == 2)
        stream_id = next(event.stream_id for event in made.events if isinstance(event, target.SubscribeDraft))
        for name, token_id in (("a", 7), ("b", 8)):
            published = target.CommitPublished(stream_id, name, 5, [token_id], True, False)
            made.servicer.dispatch([published])
        assert [list(commit.token_ids) for commit in await raw.read()] == [[8]]


class TestChannelNumbers:
    async def test_a_number_does_not_come_back_right_away(self) -> None:
        async with connected() as (_, speaker):
            link = speaker.links._links[speaker.address]
            taken = [link._channels["first"]]
            for number in range(50):
                speaker.attach(f"s{number}")
                taken.append(link._channels[f"s{number}"])
                speaker.detach(f"s{number}")
            assert len(set(taken)) == 51

    async def test_numbers_of_sessions_that_stay_are_passed_over_when_the_count_starts_again(self) -> None:
        async with connected() as (made, speaker):
            link = speaker.links._links[speaker.address]
            first = link._channels["first"]
            link._last_channel = NUM_CHANNELS - 1
            for name in "abc":
                speaker.attach(name)
            numbers = [link._channels[name] for name in "abc"]
            assert first not in numbers
            assert len(set(numbers)) == 3
            assert all(1 <= number <= NUM_CHANNELS for number in numbers)
            for name in "abc":
                speaker.say(name, 5, chain(1, 2))
            await made.until(lambda: len(made.hints()) == 6)
            for name in "abc":
                assert made.hints(name) == speaker.said_of(name)

    async def test_a_session_keeps_its_number_when_it_subscribes_again(self) -> None:
        async with connected() as (_, speaker):
            link = speaker.links._links[speaker.address]
            number = link._channels["first"]
            speaker.subscribe("first")
            assert link._channels["first"] == number

    async def test_more_sessions_than_numbers_cost_hints_and_not_the_link(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("draft_worker.links.NUM_CHANNELS", 3)
        async with connected() as (made, speaker):
            for name in "abcd":
                speaker.attach(name)
                speaker.say(name, 5, chain(1, 1))
            speaker.say("first", 5, chain(1, 1))
            await made.until(lambda: len(made.hints("first")) == 1)
            assert {name for name, *_ in made.hints()} <= {"first", "a", "b"}
            assert len(made.hints()) == 3
