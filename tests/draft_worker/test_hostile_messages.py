"""Whatever a coordinator asks of a draft worker, and whatever a target tells it: it goes on, and others are served.

Real servicers, a real engine, real streams on loopback. The targets are played: an honest one, whose sessions must
always be hinted at, and one that lies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from draft_worker.links import MAX_FRAME_COMMITS
from outrider.errors import HeadMismatch
from outrider.message_sizes import MAX_MESSAGE_BYTES
from protos.outrider.v1 import common_pb2, draft_pb2, hints_pb2
from tests.hostile import EFFORTS, MANY, WAIT_S, mangled, messages, try_out
from tests.models import VOCAB_SIZE
from tests.served import ATTACH, MAX_MODEL_LEN, ServedDraft, served_draft
from tests.target_worker.test_hostile_messages import NEARLY_RIGHT as GENERATIONS
from tests.target_worker.test_hostile_messages import REFUSALS

UINT32_MAX = 2**32 - 1
PROMPT = [5, 6, 7, 8]


@dataclass
class Target:
    """Serves Hints in bare bytes. Whoever subscribes is told `script`; its channels 0 to 9 are the subscribed ones."""

    script: Sequence[hints_pb2.CommitFrame | bytes] = ()
    address: str = ""
    num_streams: int = 0
    heard: asyncio.Queue[tuple[hints_pb2.HintFrame, asyncio.Queue[bytes]]] = field(default_factory=asyncio.Queue)

    async def exchange(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        said: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_streams += 1

        async def listen() -> None:
            async for raw in frames:
                frame = hints_pb2.HintFrame.FromString(raw)
                if frame.subscribe:
                    channels = [each.channel for each in frame.subscribe]
                    for each in self.script:
                        said.put_nowait(each if isinstance(each, bytes) else _addressed(each, channels))
                self.heard.put_nowait((frame, said))

        listening = asyncio.create_task(listen())
        try:
            while True:
                yield await said.get()
        finally:
            listening.cancel()

    def handler(self) -> Any:
        method = grpc.stream_stream_rpc_method_handler(self.exchange)
        return grpc.method_handlers_generic_handler("outrider.v1.Hints", {"Exchange": method})


def _addressed(frame: hints_pb2.CommitFrame, channels: Sequence[int]) -> bytes:
    addressed = hints_pb2.CommitFrame()
    addressed.CopyFrom(frame)
    for each in addressed.commits:
        if each.channel < 10:
            each.channel = channels[each.channel % len(channels)]
    return addressed.SerializeToString()


@dataclass
class Stage:
    draft: ServedDraft
    honest: Target
    liar: Target

    def attach(self, name: str, target: Target, **changes: Any) -> draft_pb2.AttachRequest:
        fields: dict[str, Any] = {
            "session_id": name,
            "attachment": 1,
            "target_address": target.address,
            "token_ids": PROMPT,
            "sampling": common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=99),
        }
        return draft_pb2.AttachRequest(**(fields | changes))

    async def check_service(self) -> None:
        """A session of the honest target is hinted at, is told a commit and is hinted at again."""
        while not self.honest.heard.empty():
            self.honest.heard.get_nowait()
        async with asyncio.timeout(WAIT_S):
            call = self.draft.channel.unary_stream(ATTACH)(self.attach("honest", self.honest).SerializeToString())
            answering = asyncio.create_task(self._drain(call))
            try:
                base_len, channel = len(PROMPT), None
                while True:
                    frame, said = await self.honest.heard.get()
                    channel = next((each.channel for each in frame.subscribe if each.session_id == "honest"), channel)
                    lens = [nodes.base_len for nodes in frame.nodes if nodes.channel == channel]
                    if base_len in lens:
                        if base_len > len(PROMPT):
                            break
                        base_len += 1
                        # A token that no draft would say: the cursor is lost, and a new root is planted.
                        said.put_nowait(one(channel=channel, token_ids=[VOCAB_SIZE - 1]).SerializeToString())
            finally:
                call.cancel()
                await asyncio.wait([answering])
            while self.draft.scheduler.num_sessions:  # noqa: ASYNC110 - the model's thread owns them
                await asyncio.sleep(0.005)
        assert not self.draft.failures
        self.draft.scheduler.allocator.check_integrity([])

    @staticmethod
    async def _drain(call: Any) -> None:
        try:
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with served_draft() as draft:
        made = Stage(draft, Target(), Target())
        servers = [draft.runner.run(_serve(target)) for target in (made.honest, made.liar)]
        draft.runner.run(made.check_service())
        try:
            yield made
        finally:
            for server in servers:
                draft.runner.run(server.stop(None))


async def _serve(target: Target) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((target.handler(),))
    target.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return server


# What targets say.

COUNTS = st.sampled_from([0, 0, 1, 3, UINT32_MAX])
LENS = st.sampled_from([0, 1, 3, 4, 4, 4, 5, 6, 9, 200, MAX_MODEL_LEN, UINT32_MAX])
COMMITS = st.builds(
    hints_pb2.SessionCommit,
    channel=st.sampled_from([0, 0, 1, 2, 3, 16383, UINT32_MAX]),
    from_len=LENS,
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([VOCAB_SIZE, UINT32_MAX]), max_size=6)
    | st.just([1] * 300),
    is_paused=st.booleans(),
    is_finished=st.sampled_from([False, False, False, False, True]),
    num_tried_hints=COUNTS,
    num_held_hints=COUNTS,
)


def frames() -> SearchStrategy[hints_pb2.CommitFrame | bytes]:
    frame = st.builds(hints_pb2.CommitFrame, commits=st.lists(COMMITS, max_size=6))
    return frame | frame | messages(hints_pb2.CommitFrame) | mangled(frame) | st.binary(max_size=9)


async def lie(stage: Stage, said: Sequence[hints_pb2.CommitFrame | bytes], num_sessions: int, for_s: float) -> None:
    """Sessions of the liar's for a while, in which it says all that it has to say."""
    stage.liar.script = said
    requests = [stage.attach(f"lied-to-{number}", stage.liar) for number in range(num_sessions)]
    calls = [stage.draft.channel.unary_stream(ATTACH)(each.SerializeToString()) for each in requests]
    following = [asyncio.create_task(stage._drain(call)) for call in calls]
    await asyncio.sleep(for_s)  # nothing tells when the last lie has been heard
    for session in list(stage.draft.scheduler._sessions.values()):
        assert len(session.token_ids) < MAX_MODEL_LEN
        assert len(session.nodes) <= stage.draft.scheduler.limits.max_nodes
    for call in calls:
        call.cancel()
    await asyncio.wait(following)


@pytest.mark.thorough
@EFFORTS
def test_no_lie_of_a_target_reaches_another_ones_sessions(stage: Stage, effort: int) -> None:
    def check(said: list[hints_pb2.CommitFrame | bytes], num_sessions: int) -> None:
        stage.draft.runner.run(lie(stage, said, num_sessions, 0.03))
        stage.draft.runner.run(stage.check_service())

    said = st.lists(frames(), min_size=1, max_size=8)
    try_out(check, effort, 40, said=said, num_sessions=st.integers(1, 4))


def one(**fields: Any) -> hints_pb2.CommitFrame:
    return hints_pb2.CommitFrame(commits=[hints_pb2.SessionCommit(**({"from_len": len(PROMPT)} | fields))])


@pytest.mark.parametrize(
    "said",
    [
        [b"\xff\xff\xff"],
        [b"\x0a" + b"\0" * MAX_MESSAGE_BYTES],
        [hints_pb2.CommitFrame(commits=[hints_pb2.SessionCommit()] * (MAX_FRAME_COMMITS + 1))],
        [hints_pb2.CommitFrame(commits=[hints_pb2.SessionCommit(from_len=9)] * 1000)] * 40,
        [one(token_ids=[1] * 1_000_000)] * 20,
        [one(token_ids=[1] * 100), one(from_len=104, token_ids=[1] * 100), one(from_len=204, token_ids=[1] * 100)],
        [one(token_ids=[VOCAB_SIZE])],
        [one(token_ids=[1], num_held_hints=UINT32_MAX, num_tried_hints=1)],
        [one(token_ids=[1], num_held_hints=UINT32_MAX, num_tried_hints=UINT32_MAX)] * 300,
        [one(is_finished=True)] * 1000,
        [one(is_paused=True), one()] * 200,
    ],
    ids=[
        *("no message", "too large", "too many", "jumps", "a million tokens", "longer than the model", "unreadable"),
        *("more held than tried", "many held", "finished again and again", "paused and not"),
    ],
)  # fmt: skip
def test_a_target_that_lies_loses_its_own_sessions_at_most(
    stage: Stage, said: Sequence[hints_pb2.CommitFrame | bytes]
) -> None:
    stage.draft.runner.run(lie(stage, said, 2, 0.2))
    stage.draft.runner.run(stage.check_service())


def test_a_stream_that_brought_no_message_is_opened_again(stage: Stage) -> None:
    """Or every later session of that target would go without hints."""
    num_before = stage.liar.num_streams

    async def both() -> None:
        async with asyncio.timeout(WAIT_S):
            while stage.liar.num_streams < num_before + 2:
                await lie(stage, [b"\xff\xff\xff"], 1, 0.5)
        stage.liar.script = ()

    stage.draft.runner.run(both())


# What coordinators ask.

ATTACHMENTS = st.builds(
    lambda generation, address, attachment: draft_pb2.AttachRequest(
        session_id=generation.session_id,
        attachment=attachment,
        target_address=address,
        token_ids=generation.token_ids,
        num_prompt_tokens=generation.num_prompt_tokens,
        sampling=generation.sampling,
        speculation=generation.speculation,
    ),
    GENERATIONS,
    st.sampled_from(
        ["127.0.0.1:1", "127.0.0.1:1", "", ":", "::::", "nowhere.invalid:1", "\0:1", "unix:/", "é:1", "x" * 9999 + ":1"]
    ),
    st.sampled_from([0, 1, UINT32_MAX]),
)  # fmt: skip


@EFFORTS
def test_any_attachment_is_answered(stage: Stage, effort: int) -> None:
    permitted = REFUSALS | {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNKNOWN}

    def check(raw: bytes) -> None:
        async def attach() -> grpc.StatusCode:
            # One that is right goes on until it is let go of: its first status, a second later, is not waited for.
            try:
                async with asyncio.timeout(0.02):
                    code, _ = await stage.draft.calling(ATTACH, raw)
                    return code
            except TimeoutError:
                return grpc.StatusCode.OK

        assert stage.draft.runner.run(attach()) in permitted
        assert not stage.draft.failures

    anything = messages(draft_pb2.AttachRequest)
    raw = (ATTACHMENTS | anything).map(lambda each: each.SerializeToString())
    try_out(check, effort, 120, raw=raw | mangled(ATTACHMENTS))
    stage.draft.runner.run(stage.check_service())


def test_an_attachment_has_the_salt_and_the_owner_that_its_coordinator_sent(stage: Stage) -> None:
    request = stage.attach("salted", stage.honest, cache_salt="search", owner="search's")
    attached = stage.draft.servicer._parse(request)
    assert (attached.cache_salt, attached.owner) == ("search", "search's")


@pytest.mark.parametrize(("sent", "kept"), [("", "it keeps none"), ("cd" * 16, "of the head cdcdcdcdcdcdcdcd)")])
def test_a_target_that_sends_no_features_for_the_head_is_refused_by_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, sent: str, kept: str
) -> None:
    info = common_pb2.WorkerInfo(head_fingerprint="ab" * 16)
    monkeypatch.setattr(stage.draft.servicer, "info", info)
    with pytest.raises(HeadMismatch, match="--draft-head") as refusal:
        stage.draft.servicer._parse(stage.attach("blind", stage.honest, head_fingerprint=sent))
    assert "runs the draft head abababababababab," in refusal.value.message
    assert kept in refusal.value.message
    stage.draft.servicer._parse(stage.attach("seeing", stage.honest, head_fingerprint="ab" * 16))


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1] * MANY},
        {"token_ids": [VOCAB_SIZE]},
        {"session_id": "x" * 3_000_000},
        {"cache_salt": "x" * 129},
        {"owner": "x" * 65},
        {"target_address": "\U0001f600" * 500_000},
        {"tokenizer_fingerprint": "x" * 3_000_000},
        {"head_fingerprint": "x" * 3_000_000, "token_ids": [VOCAB_SIZE]},
        {"sampling": common_pb2.SamplingParams(top_p=1, max_tokens=1, allowed_token_ids=range(MANY))},
        {"sampling": common_pb2.SamplingParams(top_p=1, max_tokens=1, grammar=common_pb2.Grammar(lark="&" * MANY))},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_an_attachment_of_any_size_is_refused_by_name(stage: Stage, fields: dict[str, Any]) -> None:
    code, answers = stage.draft.call(ATTACH, stage.attach("fuzz", stage.liar, **fields).SerializeToString())
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert answers == []
    stage.draft.runner.run(stage.check_service())
