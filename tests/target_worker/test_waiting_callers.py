"""A caller whose session waits, for its turn or because it was preempted, hears that somebody is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarState
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import GrammarSpec
from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_worker.messages import Event, TokensCommitted
from target_worker.serving import server as target_server
from target_worker.serving.server import TargetServicer
from tests.served import listening


class Slow:
    """Stands for a model thread that has other things to do."""

    def submit(self, event: Event, *, is_release: bool = False, peer: str | None = None) -> bool:
        return True

    def stalled_s(self) -> float:
        return self.stalled_for_s

    stalled_for_s = 0.0


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch,
    compiler: GrammarCompiler | None = None,
    *,
    incarnation: str = "",
    thread: Slow | None = None,
) -> AsyncIterator[tuple[TargetServicer, target_pb2_grpc.TargetStub]]:
    """A target whose model never gets to a session, which says so fifty times a second, and calls to it."""
    monkeypatch.setattr(target_server, "WAITING_EVERY_S", 0.02)
    compiler = compiler or GrammarCompiler(Path("none"), vocab_size=100, eos_token_ids=frozenset())
    info = common_pb2.WorkerInfo(vocab_size=100, incarnation=incarnation)
    servicer = TargetServicer(info, TargetMetrics("tiny", "t"), compiler)
    servicer.bind(thread or Slow())  # type: ignore[arg-type]
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServicer_to_server(servicer, server)
    async with listening(server) as channel:
        yield servicer, target_pb2_grpc.TargetStub(channel)


async def test_a_caller_that_waits_hears_so_before_its_first_token_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that was preempted waits as one that has not begun: its target is well, and nobody should leave it."""
    slow = Slow()
    request = target_pb2.GenerateRequest(
        session_id="s",
        token_ids=[5],
        sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=4),
    )
    async with served(monkeypatch, thread=slow) as (servicer, stub):
        call = stub.Generate(request, timeout=60)
        for _ in range(3):
            assert (await call.read()).WhichOneof("event") == "waiting"
        slow.stalled_for_s = 60.0  # what hangs must not look as if it did not
        async with asyncio.timeout(30):
            while True:
                reading = asyncio.ensure_future(call.read())
                if not (await asyncio.wait([reading], timeout=0.3))[0]:
                    break
        slow.stalled_for_s = 0.0
        servicer.dispatch([TokensCommitted("s", [7], [common_pb2.TOKEN_ORIGIN_PLAIN], 0, 0, 1.0)])
        event = await reading
        while event.WhichOneof("event") == "waiting":  # one may have been on its way
            event = await call.read()
        assert list(event.step.token_ids) == [7]
        assert (await call.read()).WhichOneof("event") == "waiting"
        call.cancel()


async def test_a_target_whose_model_stands_still_does_not_say_that_it_has_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks it is not to blame for it."""
    slow = Slow()
    slow.stalled_for_s = 60.0
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=4)
    request = target_pb2.GenerateRequest(session_id="s", token_ids=[5], sampling=sampling)
    async with served(monkeypatch, thread=slow) as (servicer, stub):
        call = stub.Generate(request, timeout=60)
        reading = asyncio.ensure_future(call.read())
        async with asyncio.timeout(30):
            while "s" not in servicer._callers:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # ten times as long as it would take to say so
        assert not reading.done()
        slow.stalled_for_s = 0.0
        assert (await reading).WhichOneof("event") == "waiting"
        call.cancel()


async def test_a_request_for_an_earlier_life_of_the_worker_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever sent it knows the record of a worker that has gone; this one may have other weights."""
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=4)
    async with served(monkeypatch, incarnation="second") as (_, stub):
        for incarnation, code in (
            ("first", grpc.StatusCode.FAILED_PRECONDITION),
            ("second", None),
            ("", None),
        ):
            request = target_pb2.GenerateRequest(
                session_id=f"s{incarnation}", token_ids=[5], sampling=sampling, incarnation=incarnation
            )
            call = stub.Generate(request, timeout=60)
            if code is None:
                assert (await call.read()).WhichOneof("event") == "waiting"
                call.cancel()
            else:
                assert await call.code() is code


async def test_one_request_that_workers_were_lost_to_is_tried_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever sends them: of two that are there when the worker dies, one would be blamed for the other."""
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=40)

    def request(session_id: str, trial_tokens: int) -> target_pb2.GenerateRequest:
        return target_pb2.GenerateRequest(
            session_id=session_id, token_ids=[5], sampling=sampling, trial_tokens=trial_tokens
        )

    def committed(session_id: str) -> TokensCommitted:
        return TokensCommitted(session_id, [7, 8], [common_pb2.TOKEN_ORIGIN_PLAIN] * 2, 0, 0, 1.0)

    async with served(monkeypatch) as (servicer, stub):
        first = stub.Generate(request("first", 4), timeout=60)
        assert (await first.read()).WhichOneof("event") == "waiting"
        other = stub.Generate(request("other", 0), timeout=60)
        assert (await other.read()).WhichOneof("event") == "waiting"
        for num_steps in range(3):
            second = stub.Generate(request(f"second-{num_steps}", 4), timeout=60)
            if num_steps < 2:
                assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                servicer.dispatch([committed("first"), committed("other")])
                while (await first.read()).WhichOneof("event") == "waiting":
                    pass
            else:
                assert (await second.read()).WhichOneof("event") == "waiting", "the first has passed"
        second.cancel()
        async with asyncio.timeout(30):
            while True:  # it is free again once the call has ended
                third = stub.Generate(request("third", 4), timeout=60)
                with suppress(grpc.aio.AioRpcError):
                    assert (await third.read()).WhichOneof("event") == "waiting"
                    break
        first.cancel()
        other.cancel()
        third.cancel()


async def refusal_of(call: Any) -> grpc.aio.AioRpcError:
    """The error with which a call ends, after all its messages were read. Raises AssertionError if it has none."""
    try:
        async with asyncio.timeout(30):
            while isinstance(await call.read(), Message):
                pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("it was not refused")


class SlowCompiler(GrammarCompiler):
    """A grammar compiler that waits for `gate` and then refuses."""

    def __init__(self) -> None:
        super().__init__(Path("none"), vocab_size=100, eos_token_ids=frozenset())
        self.owners: list[str] = []
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def compile_async(self, spec: GrammarSpec, owner: str = "") -> GrammarState:
        self.owners.append(owner)
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise InvalidRequest("grammar", "the grammar takes longer than 5 s to compile")


async def test_a_request_is_tried_alone_while_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar can bring a worker down too, and an innocent request with it that one more loss would end."""
    compiler = SlowCompiler()
    plain = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=40)
    guided = common_pb2.SamplingParams(top_p=1, max_tokens=4, grammar=common_pb2.Grammar(regex="a"))

    def request(session_id: str, sampling: common_pb2.SamplingParams) -> target_pb2.GenerateRequest:
        return target_pb2.GenerateRequest(session_id=session_id, token_ids=[5], sampling=sampling, trial_tokens=4)

    async with served(monkeypatch, compiler) as (_, stub):
        leaving = stub.Generate(request("leaving", guided), timeout=30)
        await leaving.read()
        async with asyncio.timeout(30):
            await compiler.begun.wait()
        other = stub.Generate(request("other", plain), timeout=30)
        assert await other.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        leaving.cancel()
        async with asyncio.timeout(30):
            await compiler.cancelled.wait()

        refused = stub.Generate(request("refused", guided), timeout=30)
        assert (await refused.read()).WhichOneof("event") == "waiting", "nobody else is tried any more"
        compiler.gate.set()
        assert (await refusal_of(refused)).code() is grpc.StatusCode.INVALID_ARGUMENT
        last = stub.Generate(request("last", plain), timeout=30)
        assert (await last.read()).WhichOneof("event") == "waiting"
        last.cancel()


async def test_a_caller_hears_that_its_grammar_is_being_compiled_and_why_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = SlowCompiler()
    sampling = common_pb2.SamplingParams(top_p=1, max_tokens=4, grammar=common_pb2.Grammar(regex="a"))
    request = target_pb2.GenerateRequest(session_id="s", token_ids=[5], sampling=sampling, owner="one")
    async with served(monkeypatch, compiler) as (servicer, stub):
        call = stub.Generate(request, timeout=30)
        assert not (await call.read()).waiting.is_compiling, "at once: the worker has the request"
        for _ in range(3):
            event = await call.read()
            assert event.WhichOneof("event") == "waiting"
            assert event.waiting.is_compiling
        assert servicer.num_compiling == 1
        assert compiler.owners == ["one"]
        call.cancel()
        async with asyncio.timeout(30):
            await compiler.cancelled.wait()

        refused = stub.Generate(request, timeout=30)
        await refused.read()
        compiler.gate.set()
        refusal = await refusal_of(refused)
        assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "longer than 5 s" in (refusal.details() or "")
        assert servicer.num_compiling == 0


@pytest.mark.parametrize(("stalled_s", "stalled_ms"), [(0.0, 0), (2.5, 2500), (float("inf"), 3_600_000)])
async def test_a_target_tells_for_how_long_its_model_has_stood_still(
    monkeypatch: pytest.MonkeyPatch, stalled_s: float, stalled_ms: int
) -> None:
    thread = Slow()
    thread.stalled_for_s = stalled_s
    async with served(monkeypatch, incarnation="1", thread=thread) as (_, stub):
        info = await stub.GetInfo(common_pb2.GetInfoRequest())
        assert (info.incarnation, info.vocab_size, info.stalled_ms) == ("1", 100, stalled_ms)
