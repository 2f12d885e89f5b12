"""A fake target speaks the product's protocol, and its steps take what was asked for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from benchmarks.shared.fake_targets import FakeTarget, WallClock, stamp_token_ids
from benchmarks.shared.step_stamps import ALPHABET, STAMP_CHARS, delays_s
from command_line.checkout import DEMO_TARGET
from command_line.simulator.fleet import DraftPool, Fleet, TargetPool
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import target_pb2, target_pb2_grpc
from tests.coordinator.fakes import eventually

TOKEN_IDS = list(range(1000, 1000 + len(ALPHABET)))
FLEET = Fleet(target=TargetPool(count=1, fixed_ms=1.0, max_num_seqs=2), draft=DraftPool(count=0))


@asynccontextmanager
async def served(*, is_stamped: bool) -> AsyncIterator[tuple[FakeTarget, target_pb2_grpc.TargetStub]]:
    target = FakeTarget(FLEET, TOKEN_IDS, is_stamped=is_stamped, worker_id="fake-0", model="fake")
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServicer_to_server(target.servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield target, target_pb2_grpc.TargetStub(channel)
    finally:
        await server.stop(None)


def sessions(target: FakeTarget) -> tuple[int, int]:
    """Those that run, and those that wait."""
    return target.load().num_running, target.load().num_waiting


async def generate(
    stub: target_pb2_grpc.TargetStub, name: str, max_tokens: int
) -> tuple[list[target_pb2.StepOutput], target_pb2.SessionFinished]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True).to_proto()
    request = target_pb2.GenerateRequest(session_id=name, token_ids=[5, 6, 7], sampling=sampling)
    steps, finished = [], None
    async for event in stub.Generate(request, timeout=30.0):
        if event.HasField("step"):
            steps.append(event.step)
        if event.HasField("finished"):
            finished = event.finished
    assert finished is not None
    return steps, finished


async def test_each_step_commits_the_time_at_which_it_ended() -> None:
    async with served(is_stamped=True) as (_, stub):
        steps, finished = await generate(stub, "a", 3 * STAMP_CHARS)
        read_s = asyncio.get_running_loop().time()
    assert [len(step.token_ids) for step in steps] == [STAMP_CHARS] * 3
    assert {(step.num_draft_tokens, step.num_accepted_draft_tokens) for step in steps} == {(4, 3)}
    text = "".join(ALPHABET[TOKEN_IDS.index(token_id)] for step in steps for token_id in step.token_ids)
    delays = list(delays_s(text, read_s))
    assert delays == sorted(delays, reverse=True), "later steps ended later"
    assert finished.num_output_tokens == 3 * STAMP_CHARS


async def test_sessions_beyond_the_slots_wait_and_are_counted() -> None:
    async with served(is_stamped=False) as (target, stub):
        tasks = [asyncio.create_task(generate(stub, str(number), 40)) for number in range(3)]
        seen = set()
        while not all(task.done() for task in tasks):
            seen.add(sessions(target))
            await asyncio.sleep(0)
        assert (2, 1) in seen
        for task in tasks:
            steps, finished = await task
            assert [list(step.token_ids) for step in steps] == [TOKEN_IDS[:1]] * 40
            assert finished.num_output_tokens == 40
        assert sessions(target) == (0, 0)


async def test_a_client_that_leaves_frees_its_slot() -> None:
    async with served(is_stamped=False) as (target, stub):
        task = asyncio.create_task(generate(stub, "a", 4000))
        await eventually(lambda: sessions(target) == (1, 0), "the session runs")
        task.cancel()
        await eventually(lambda: sessions(target) == (0, 0), "the session has ended", 30.0)


def test_a_late_timer_shows_when_it_was_due() -> None:
    async def follow() -> list[float]:
        clock, shown, is_over = WallClock(), [], asyncio.Event()
        begin_s = clock.now_s

        def step() -> None:
            shown.append(clock.now_s - begin_s)
            if len(shown) < 20:
                clock.at(clock.now_s + 0.001, step)
            else:
                is_over.set()

        clock.at(begin_s + 0.001, step)
        await is_over.wait()
        assert clock.now_s >= begin_s + 0.02
        return shown

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        assert runner.run(follow()) == pytest.approx([0.001 * (number + 1) for number in range(20)])


def test_the_demo_tokenizer_has_a_token_for_each_character() -> None:
    tokenizer = Tokenizer(Path(DEMO_TARGET))
    token_ids = stamp_token_ids(tokenizer)
    assert len(set(token_ids)) == len(ALPHABET)
    assert tokenizer.decode(token_ids) == ALPHABET
