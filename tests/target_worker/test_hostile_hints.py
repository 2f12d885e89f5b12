"""A hint stream that tells every lie it can: each session says what it would have said alone (I2), and nothing grows
(I7).

Real servicer, real engine, real streams on loopback; when a frame arrives is left to chance, what comes of it is not.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from outrider.hint_service.draft_streams import MAX_CHANNEL, MAX_FRAME_MESSAGES, MAX_FRAME_NODES
from outrider.hints.hint_tree import MAX_PATH_KEPT, Hint
from outrider.hints.hint_wire import MAX_NODES_PER_MESSAGE
from outrider.message_sizes import MAX_MESSAGE_BYTES
from outrider.sampling_params import MAX_DRAFT_PROBS
from protos.outrider.v1 import common_pb2, hints_pb2, target_pb2
from target_worker.messages import HintsArrived
from tests.hostile import EFFORTS, UINT32, WAIT_S, mangled, messages, try_out
from tests.models import VOCAB_SIZE
from tests.served import EXCHANGE, ServedTarget, served_target
from tests.target_worker.fakes import start
from tests.target_worker.test_scheduler import World

NUM_TOKENS = 24
UINT32_MAX = 2**32 - 1


def request(name: str, *token_ids: int, **sampling: float) -> target_pb2.GenerateRequest:
    values = {"temperature": 0.0, "top_p": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    return target_pb2.GenerateRequest(
        session_id=name,
        token_ids=token_ids,
        sampling=common_pb2.SamplingParams(**values),  # type: ignore[arg-type]
        # Hints are verified whether that pays or not.
        speculation=common_pb2.SpeculationParams(enabled=True, always=True),
    )


REQUESTS = [
    request("a", 5, 6, 7),
    request("b", *range(30, 60)),
    request("c", 9, 9, temperature=0.9, seed=11),
    request("d", 80, 81, 82, repetition_penalty=1.3, presence_penalty=0.5),
]
NAMES = [each.session_id for each in REQUESTS]


@dataclass
class Knowledge:
    """The whole sequence of every session, which a draft would have to guess. Wrong hints are most harmful when nearly
    right."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    num_prompt: dict[str, int] = field(default_factory=dict)


KNOWN = Knowledge()


@pytest.fixture(scope="module")
def target() -> Iterator[ServedTarget]:
    with served_target() as opened:
        for each in REQUESTS:
            text = opened.runner.run(opened.text(each))
            assert len(text) == NUM_TOKENS
            KNOWN.texts[each.session_id] = [*each.token_ids, *text]
            KNOWN.num_prompt[each.session_id] = len(each.token_ids)
        yield opened


# What a frame may hold.

CHANNELS = st.sampled_from([0, 1, 1, 2, 2, 3, MAX_CHANNEL, MAX_CHANNEL + 1, UINT32_MAX])
SESSION_IDS = st.sampled_from([*NAMES, *NAMES, *NAMES, "", "nobody", "x" * 64, "x" * 65, "\0"])
SUBSCRIBES = st.builds(
    hints_pb2.Subscribe,
    session_id=SESSION_IDS,
    attachment=st.sampled_from([0, 1, 1, 1, 2, UINT32_MAX]),
    known_len=st.sampled_from([0, 1, 3, 30, 40, UINT32_MAX]),
    channel=CHANNELS,
)
NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 512, UINT32_MAX])


@st.composite
def nodes(draw: st.DrawFn) -> hints_pb2.HintNodes:
    """A tree of true and false tokens, and then some of it put wrong."""
    name = draw(st.sampled_from(NAMES))
    message = hints_pb2.HintNodes(channel=draw(CHANNELS))
    base_len = KNOWN.num_prompt[name] + draw(st.integers(-2, NUM_TOKENS + 2))
    message.base_len = draw(st.sampled_from([base_len, base_len, base_len, 0, 1, UINT32_MAX]))
    message.match_len = draw(st.sampled_from([0, 3, 24, UINT32_MAX]))
    if draw(st.booleans()):
        message.first_node_id = draw(st.sampled_from([1, 1, 1, 2, 200, UINT32_MAX - 1, UINT32_MAX]))
    num_nodes = draw(st.sampled_from([0, 1, 2, 5, 12, 40, MAX_NODES_PER_MESSAGE, MAX_NODES_PER_MESSAGE + 1]))
    truth, chance = KNOWN.texts[name], random.Random(draw(st.integers(0, 2**32)))
    with_supports = draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    branching = draw(st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    first, depths = message.first_node_id or 1, {0: 0}
    for index in range(num_nodes):
        node_id = first + index
        parent_id = (node_id - 1 if index else 0) if chance.random() >= branching else chance.choice([*depths])
        depth = depths.get(parent_id, 0) + 1
        depths[node_id] = depth
        message.parent_ids.append(min(parent_id, UINT32_MAX))
        place = base_len + depth - 1
        is_true = 0 <= place < len(truth) and chance.random() < 0.9
        token_id = truth[place] if is_true else chance.choice([0, chance.randrange(VOCAB_SIZE), VOCAB_SIZE, UINT32_MAX])
        if chance.random() < with_supports:
            others = chance.sample(range(VOCAB_SIZE), chance.choice([0, 1, MAX_DRAFT_PROBS - 1, MAX_DRAFT_PROBS]))
            message.support_sizes.append(1 + len(others))
            message.support_token_ids.extend([token_id, *others])
            message.support_weights.extend(
                [chance.choice([1, 1000, 0, UINT32_MAX]), *([chance.choice([1, 0, 65536])] * len(others))]
            )
        else:
            message.token_ids.append(token_id)
            if with_supports:
                message.support_sizes.append(0)
        if not with_supports:
            message.confidences.append(chance.choice([0, 1, 127, 128, UINT32_MAX]))
    for lie in draw(st.lists(st.sampled_from(sorted(LIES)), max_size=2)):
        column, change = LIES[lie]
        values = list(getattr(message, column))
        del getattr(message, column)[:]
        getattr(message, column).extend(change(values, draw))
    return message


def _one_wrong(values: Sequence[int], draw: st.DrawFn) -> list[int]:
    wrong = list(values)
    if wrong:
        wrong[draw(st.integers(0, len(wrong) - 1))] = draw(NUMBERS)
    return wrong


LIES = {
    "cycle, or a parent that is not there": ("parent_ids", _one_wrong),
    "parents after children": ("parent_ids", lambda values, draw: values[::-1]),
    "their own parents": ("parent_ids", lambda values, draw: [number + 1 for number in range(len(values))]),
    "ids told twice": ("node_ids", lambda values, draw: draw(st.lists(NUMBERS, max_size=12))),
    "a column too short": ("token_ids", lambda values, draw: values[1:]),
    "a column too long": ("token_ids", lambda values, draw: [*values, 1]),
    "weights too few": ("support_weights", lambda values, draw: values[1:]),
    "sizes too large": ("support_sizes", _one_wrong),
    "confidences for others": ("confidences", lambda values, draw: [*values, 127]),
    "another token": ("token_ids", _one_wrong),
}  # fmt: skip


def frames() -> SearchStrategy[bytes]:
    frame = st.builds(
        hints_pb2.HintFrame,
        subscribe=st.lists(SUBSCRIBES, max_size=4),
        nodes=st.lists(nodes(), max_size=4),
        unsubscribe=st.lists(SESSION_IDS, max_size=1),
    )
    any_nodes = messages(hints_pb2.HintNodes, channel=CHANNELS, base_len=NUMBERS)
    anything = messages(hints_pb2.HintFrame, subscribe=st.lists(SUBSCRIBES), nodes=st.lists(any_nodes, max_size=3))
    return (frame | frame | frame | anything).map(lambda each: each.SerializeToString()) | mangled(frame)


def welcome(channel_of: dict[str, int], *, is_memory: bool = False) -> bytes:
    """The first message of an honest draft or memory worker: its subscriptions."""
    return hints_pb2.HintFrame(
        subscribe=[
            hints_pb2.Subscribe(session_id=name, attachment=1, channel=channel, is_memory=is_memory)
            for name, channel in channel_of.items()
        ]
    ).SerializeToString()


async def lie(target: ServedTarget, said: Iterable[bytes], pause_s: float) -> grpc.StatusCode:
    """Sends the frames in one stream, and returns the status with which it ends."""
    call = target.channel.stream_stream(EXCHANGE)()
    try:
        for frame in said:
            await call.write(frame)
            await asyncio.sleep(pause_s)
        await call.done_writing()
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except asyncio.CancelledError:
        call.cancel()
        raise
    return await call.code()


async def say_all(target: ServedTarget) -> dict[str, list[int]]:
    texts = await asyncio.gather(*(target.text(each) for each in REQUESTS))
    return {name: [*each.token_ids, *text] for name, each, text in zip(NAMES, REQUESTS, texts, strict=True)}


def check_bounds(target: ServedTarget) -> None:
    """As they look from another thread, which may see what is just being put right."""
    limits = target.scheduler.limits
    assert len(target.scheduler._early._kept) <= limits.max_early_sessions + 1
    for kept in list(target.scheduler._early._kept.values()):
        assert len(kept.events) <= limits.max_early_events
        assert kept.num_hints <= limits.max_early_hints
    for session in list(target.scheduler._sessions.values()):
        for tree in [session.tree, *([] if session.memory is None else [session.memory._tree])]:
            assert len(tree) <= tree.max_nodes
            assert len(tree._path) <= MAX_PATH_KEPT + 1
        assert len(session.subscribers) <= len(target.servicer.hints) + 2  # and some that are being closed


def run(target: ServedTarget, streams: Sequence[Sequence[bytes]], pause_s: float = 0.0) -> list[grpc.StatusCode]:
    """All sessions say their texts while all streams lie; how the streams end."""

    async def both() -> list[grpc.StatusCode]:
        lying = [asyncio.create_task(lie(target, said, pause_s)) for said in streams]
        async with asyncio.timeout(WAIT_S):
            saying = asyncio.create_task(say_all(target))
            while not saying.done():
                check_bounds(target)
                await asyncio.sleep(0.002)
            assert saying.result() == KNOWN.texts
            ends = await asyncio.gather(*lying)
        await target.until_idle()
        return ends

    return target.runner.run(both())


@pytest.mark.thorough
@EFFORTS
def test_no_lie_changes_a_text(target: ServedTarget, effort: int) -> None:
    channel_of = {name: channel for channel, name in enumerate(NAMES)}
    firsts = {"draft": [welcome(channel_of)], "memory": [welcome(channel_of, is_memory=True)], "stranger": []}

    def check(streams: list[list[bytes]], introduced: list[str], pause_s: float) -> None:
        run(target, [[*firsts[as_whom], *said] for as_whom, said in zip(introduced, streams, strict=False)], pause_s)

    try_out(
        check,
        effort,
        50,
        streams=st.lists(st.lists(frames(), max_size=12), min_size=1, max_size=2),
        introduced=st.lists(st.sampled_from(sorted(firsts)), min_size=2, max_size=2),
        pause_s=st.sampled_from([0.0, 0.001, 0.004]),
    )


@pytest.mark.parametrize("is_memory", [False, True], ids=["draft", "memory"])
def test_these_lies_are_tried(target: ServedTarget, is_memory: bool) -> None:
    """Hints of the kind that the test above sends are verified, and some of them hold."""
    name = NAMES[0]
    truth, start = KNOWN.texts[name], KNOWN.num_prompt[name]
    hints = hints_pb2.HintNodes(
        channel=1, base_len=start, first_node_id=1, parent_ids=range(20), token_ids=truth[start : start + 20]
    )
    frame = hints_pb2.HintFrame(nodes=[hints]).SerializeToString()

    async def both() -> list[target_pb2.GenerateEvent]:
        lying = target.channel.stream_stream(EXCHANGE)()  # what nobody has heard of it is dropped with its end
        await lying.write(welcome({name: 1}, is_memory=is_memory))
        await lying.write(frame)
        kept = target.scheduler._early._kept  # they are there before the session is
        async with asyncio.timeout(WAIT_S):
            while not any(each.num_hints for each in list(kept.values())):  # noqa: ASYNC110 - the model's thread owns it
                await asyncio.sleep(0.005)
        code, answers = await target.calling("/outrider.v1.Target/Generate", REQUESTS[0].SerializeToString())
        assert code is grpc.StatusCode.OK
        lying.cancel()
        return [target_pb2.GenerateEvent.FromString(answer) for answer in answers]

    events = target.runner.run(both())
    num_drafted = sum(event.step.num_accepted_draft_tokens for event in events)
    assert (events[-1].finished.stats.num_memory_tokens if is_memory else num_drafted) >= 10


@pytest.mark.parametrize(
    "frame",
    [
        hints_pb2.HintFrame(nodes=[hints_pb2.HintNodes(channel=1)] * (MAX_FRAME_MESSAGES + 1)),
        hints_pb2.HintFrame(unsubscribe=[""] * 1_000_000),
        hints_pb2.HintFrame(subscribe=[hints_pb2.Subscribe(session_id="a", channel=1)] * 200_000),
        hints_pb2.HintFrame(nodes=[hints_pb2.HintNodes(channel=1, parent_ids=[0] * 512, token_ids=[1] * 512)] * 1000),
        hints_pb2.HintFrame(nodes=[hints_pb2.HintNodes(channel=1, parent_ids=[0] * MAX_FRAME_NODES, node_ids=[1])] * 2),
    ],
    ids=["messages", "unsubscribes", "subscribes", "nodes", "nodes of one message"],
)
def test_a_frame_of_too_much_ends_its_stream_at_once(target: ServedTarget, frame: hints_pb2.HintFrame) -> None:
    raw = frame.SerializeToString()
    assert len(raw) <= MAX_MESSAGE_BYTES
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.thread_time() - began)

    watching = target.runner.get_loop().create_task(watch())
    (code,) = run(target, [[welcome({name: channel for channel, name in enumerate(NAMES)}), raw]])
    watching.cancel()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert longest_s < 1.0  # of the event loop's processor time; it was six


def test_a_refused_frame_is_let_go_at_once(target: ServedTarget) -> None:
    """A call that has ended leaves cycles of references behind, and the frame, of megabytes, must not hang on them."""
    frame = hints_pb2.HintFrame(nodes=[hints_pb2.HintNodes(channel=1)] * (MAX_FRAME_MESSAGES + 1)).SerializeToString()

    def num_frames() -> int:
        return sum(isinstance(each, hints_pb2.HintFrame) for each in gc.get_objects())

    gc.collect()
    before = num_frames()  # those of other tests' parameters
    gc.disable()
    try:
        target.runner.run(lie(target, [frame], 0.0))
        target.runner.run(target.until_idle())
        assert num_frames() == before
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("num_rounds", [10, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["subscribes", "strangers", "empty", "stale", "unsubscribes"])
def test_a_flood_without_end_shuts_nobody_out(target: ServedTarget, kind: str, num_rounds: int) -> None:
    """A round of texts takes a twentieth of a second alone, and took four when a stream was read as fast as it came."""
    stale = hints_pb2.HintNodes(channel=1, base_len=1, first_node_id=1, parent_ids=[0] * 64, token_ids=[1] * 64)
    frame = {
        "subscribes": hints_pb2.HintFrame(subscribe=[hints_pb2.Subscribe(session_id="b", channel=1)] * 1000),
        "strangers": hints_pb2.HintFrame(
            subscribe=[hints_pb2.Subscribe(session_id=f"nobody {i}", channel=i) for i in range(1000)]
        ),
        "empty": hints_pb2.HintFrame(nodes=[hints_pb2.HintNodes(channel=1)] * 1000),
        "stale": hints_pb2.HintFrame(nodes=[stale] * 200),
        "unsubscribes": hints_pb2.HintFrame(unsubscribe=["b", "nobody"] * 500),
    }[kind].SerializeToString()

    async def flood() -> None:
        while True:  # who is cut off comes again
            await lie(target, itertools.chain([welcome({"b": 1})], itertools.repeat(frame)), 0.0)

    async def both() -> None:
        flooding = asyncio.create_task(flood())
        try:
            for _ in range(num_rounds):
                async with asyncio.timeout(WAIT_S / 10):
                    assert await say_all(target) == KNOWN.texts
                check_bounds(target)
            assert not flooding.done()
        finally:
            flooding.cancel()
            await asyncio.wait([flooding])
        await target.until_idle()

    target.runner.run(both())


def test_a_frame_over_the_limit_ends_its_stream_only(target: ServedTarget) -> None:
    (code,) = run(target, [[welcome({"a": 1}), b"\x0a" + b"\0" * MAX_MESSAGE_BYTES]])
    # Which of the two the client hears depends on what it is writing at that moment.
    assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)


@EFFORTS
def test_any_bytes_end_their_stream_at_most(target: ServedTarget, effort: int) -> None:
    def check(said: list[bytes]) -> None:
        run(target, [said])

    try_out(check, effort, 10, said=st.lists(st.binary(max_size=40), min_size=1, max_size=4))


@EFFORTS
def test_a_claimed_attachment_silences_one_session_only(target: ServedTarget, effort: int) -> None:
    """Whoever names the highest number speaks for a session; that costs its speed, and nobody else's."""

    def check(attachment: int) -> None:
        hints = hints_pb2.HintNodes(channel=1, base_len=3, first_node_id=1, parent_ids=[0], token_ids=[1])
        claim = hints_pb2.Subscribe(session_id="a", attachment=attachment, channel=1)
        run(target, [[hints_pb2.HintFrame(subscribe=[claim], nodes=[hints]).SerializeToString()]])

    try_out(check, effort, 4, attachment=UINT32)


def test_what_is_counted_of_hints_ends_at_what_its_field_can_hold() -> None:
    world = World()
    world.tell(start())
    for base_len in (1, 2, 3):
        world.tell(HintsArrived("a", 1, base_len, [Hint(1, 0, 1)], world.now, num_bytes=2**31))
    world.scheduler._sessions["a"].tree.num_stale += 2**40
    while "a" not in world.ended:
        world.turn()
    stats = world.ended["a"].stats
    assert (stats.num_hint_bytes, stats.num_stale_hints) == (UINT32_MAX, UINT32_MAX)
