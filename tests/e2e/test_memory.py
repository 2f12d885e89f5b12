"""Memory workers as real processes: what was generated before is hinted at, and nothing they do changes the output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from benchmarks.shared.worker_pair import Generation, WorkerPair, WorkerProcessHandle, attach_draft, worker_pair
from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.start.demo_prompts import DEMO_PROMPTS
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from tests.e2e.system import eventually, needs_the_pair, running_system

pytestmark = [pytest.mark.timeout(240), needs_the_pair]

ROUNDS_MAX = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
COUPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True)


@contextlib.asynccontextmanager
async def target_and_memory(*flags: str) -> AsyncIterator[tuple[WorkerPair, WorkerProcessHandle]]:
    """A target without lookup, and a memory worker."""
    async with worker_pair(DEMO_TARGET, None) as pair:
        memory = await WorkerProcessHandle.start("draft_worker.memory", "--tokenizer", str(DEMO_TARGET), *flags)
        try:
            async with attach_draft(pair, memory.address) as followed:
                yield followed, memory
        finally:
            await memory.stop()


class Both:
    """Attaches each session to a draft worker and to a memory worker, as a coordinator does."""

    def __init__(self, *stubs: Any) -> None:
        self._stubs = stubs

    async def Attach(self, request: Any, *, timeout: float) -> AsyncIterator[None]:  # noqa: ASYNC109 - as a stub's
        async def follow(stub: Any) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a killed worker
                async for _ in stub.Attach(request, timeout=timeout):
                    pass

        following = [asyncio.create_task(follow(stub)) for stub in self._stubs]
        try:
            yield None
            await asyncio.wait(following)
        finally:
            for task in following:
                task.cancel()
            await asyncio.wait(following)


@contextlib.asynccontextmanager
async def target_with_both() -> AsyncIterator[tuple[WorkerPair, WorkerProcessHandle, WorkerProcessHandle]]:
    """A target without lookup, a draft worker and a memory worker."""
    async with worker_pair(DEMO_TARGET, DEMO_DRAFT) as pair:
        memory = await WorkerProcessHandle.start("draft_worker.memory", "--tokenizer", str(DEMO_TARGET))
        try:
            async with attach_draft(pair, memory.address) as followed:
                both: Any = Both(pair.draft_stub, followed.draft_stub)
                assert pair.draft is not None
                yield replace(pair, draft_stub=both), pair.draft, memory
        finally:
            await memory.stop()


def prompt() -> list[int]:
    return Tokenizer(DEMO_TARGET).encode(DEMO_PROMPTS[0])


def metric(memory: WorkerProcessHandle, name: str) -> float:
    return sum(sample.value for sample in memory.metrics() if sample.name == name)


async def until_hinted(pair: WorkerPair, sampling: SamplingParams, plain: Generation) -> Generation:
    """The first generation that used hints; each must be the plain one. A busy machine may be late with some."""
    for _ in range(ROUNDS_MAX):
        found = await pair.generate(prompt(), sampling)
        assert found.token_ids == plain.token_ids
        if found.finished.stats.num_memory_tokens > len(plain.token_ids) / 3:
            return found
    raise AssertionError(f"hints were hardly used in {ROUNDS_MAX} rounds")


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_what_was_generated_before_takes_fewer_steps_and_is_the_same(sampling: SamplingParams) -> None:
    async with target_and_memory() as (pair, memory):
        plain = await pair.generate(prompt(), sampling, use_draft=False)
        hinted = await until_hinted(pair, sampling, plain)
        assert len(hinted.arrivals) < 0.7 * len(plain.arrivals)
        assert metric(memory, "outrider_memory_tokens") > len(plain.token_ids)
        assert metric(memory, "outrider_memory_hints_accepted_total") > 0


async def test_what_one_target_generated_is_hinted_at_on_another() -> None:
    async with (
        target_and_memory() as (first, memory),
        worker_pair(DEMO_TARGET, None) as other,
        attach_draft(other, memory.address) as second,
    ):
        plain = await second.generate(prompt(), GREEDY, use_draft=False)
        await first.generate(prompt(), GREEDY)
        hinted = await until_hinted(second, GREEDY, plain)
        assert len(hinted.arrivals) < 0.7 * len(plain.arrivals)


async def test_one_that_is_killed_in_the_middle_costs_nothing_but_speed() -> None:
    async with target_and_memory() as (pair, memory):
        plain = await pair.generate(prompt(), GREEDY, use_draft=False)
        await until_hinted(pair, GREEDY, plain)
        result = Generation()
        running = asyncio.create_task(pair.generate(prompt(), GREEDY, result=result))
        while not result.arrivals and not running.done():  # noqa: ASYNC110 - the list is filled by the stream
            await asyncio.sleep(0.001)
        memory.process.kill()
        assert (await running).token_ids == plain.token_ids
        assert (await pair.generate(prompt(), GREEDY)).token_ids == plain.token_ids


async def until_drafted(pair: WorkerPair, sampling: SamplingParams, plain: Generation) -> Generation:
    """The first generation that used a draft worker's hints; each must be the plain one."""
    for _ in range(ROUNDS_MAX):
        found = await pair.generate(prompt(), sampling)
        assert found.token_ids == plain.token_ids
        if found.finished.stats.num_accepted_draft_tokens > 0:
            return found
    raise AssertionError(f"a draft worker's hints were not used in {ROUNDS_MAX} rounds")


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_a_session_has_hints_of_both_and_says_the_same(sampling: SamplingParams) -> None:
    async with target_with_both() as (pair, _, memory):
        plain = await pair.generate(prompt(), sampling, use_draft=False)
        await until_drafted(pair, sampling, plain)
        hinted = await until_hinted(pair, sampling, plain)
        assert len(hinted.arrivals) < 0.7 * len(plain.arrivals)
        assert metric(memory, "outrider_memory_hints_accepted_total") > 0


@pytest.mark.parametrize("victim", ["draft", "memory"])
async def test_the_loss_of_either_leaves_the_other(victim: str) -> None:
    async with target_with_both() as (pair, draft, memory):
        plain = await pair.generate(prompt(), GREEDY, use_draft=False)
        await until_hinted(pair, GREEDY, plain)
        result = Generation()
        running = asyncio.create_task(pair.generate(prompt(), GREEDY, result=result))
        while not result.arrivals and not running.done():  # noqa: ASYNC110 - the list is filled by the stream
            await asyncio.sleep(0.001)
        (draft if victim == "draft" else memory).process.kill()
        assert (await running).token_ids == plain.token_ids
        left = await (until_hinted if victim == "draft" else until_drafted)(pair, GREEDY, plain)
        if victim == "draft":
            assert left.finished.stats.num_draft_tokens == 0
        else:
            assert left.finished.stats.num_memory_tokens == 0


async def test_one_that_is_full_refuses_and_forgets_within_its_bounds() -> None:
    async with target_and_memory("--max-num-seqs", "1", "--max-memory-tokens", "4096") as (pair, memory):
        plain = await pair.generate(prompt(), GREEDY, use_draft=False)
        for _ in range(3):
            both = await asyncio.gather(*(pair.generate(prompt(), GREEDY) for _ in range(3)))
            assert all(each.token_ids == plain.token_ids for each in both)
        assert 0 < metric(memory, "outrider_memory_tokens") <= 4096


@pytest.mark.slow
@pytest.mark.thorough
def test_serve_starts_memory_workers_for_everybody_where_there_are_no_keys(tmp_path: Path) -> None:
    flags = ("--no-draft", "--no-lookup", "--num-memory-workers", "1", "--hosting", "plain")
    with running_system(tmp_path / "cache", *flags) as system:
        plain = system.text(DEMO_PROMPTS[0], max_tokens=100, speculation={"enabled": False})

        def accepted() -> int:
            answer = system.complete(DEMO_PROMPTS[0], max_tokens=100)
            assert answer["choices"][0]["text"] == plain
            return int(answer["metrics"]["speculative_decoding"]["num_memory_tokens"])

        eventually(accepted, lambda number: number > 20, "hints of the memory worker are accepted", 60.0)
        assert system.metric("memory-0", "outrider_memory_hits_total") > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_serve_starts_draft_and_memory_workers_and_a_request_has_both(tmp_path: Path) -> None:
    with running_system(tmp_path / "cache", "--no-lookup", "--num-memory-workers", "1", "--hosting", "plain") as system:
        plain = system.text(DEMO_PROMPTS[0], max_tokens=100, speculation={"enabled": False})
        found = {"num_accepted_draft_tokens": 0, "num_memory_tokens": 0}

        def accepted() -> dict[str, int]:
            answer = system.complete(DEMO_PROMPTS[0], max_tokens=100)
            assert answer["choices"][0]["text"] == plain
            for name in found:
                found[name] += int(answer["metrics"]["speculative_decoding"][name])
            return found

        eventually(accepted, lambda both: min(both.values()) > 0, "hints of both workers are accepted", 60.0)
        assert system.metric("target-0", "outrider_memory_accepted_tokens_total") >= found["num_memory_tokens"]
