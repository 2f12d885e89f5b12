"""A coordinator that was stopped for a while blames nobody: its timers fire first, and what its workers have said lies
there."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import AsyncExitStack
from functools import partial

import grpc
import httpx
import pytest

from coordinator.placement.admission import Admission
from coordinator.placement.slot_queue import Slot
from coordinator.workers.silence import SilenceWatch
from outrider.observability.loop_lag import TICK_S, LoopLag
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, eventually, serving
from tests.coordinator.stopped_coordinator import SILENCE_MAX_S
from tests.simulation.clock import SimulatedLoop

SILENCE_S = 0.4
HELD_UP_S = 1.0
STOPPED_S = 3.0
NUM_TOKENS = 60


QUEUE_WAIT_S = 3.0


def hold_up(seconds: float = HELD_UP_S) -> None:
    """The whole process, as far as its event loop is concerned."""
    time.sleep(seconds)


def noted(steps: list[int], num_tokens: int) -> bool:
    """That a target has come so far; it may go on."""
    steps.append(num_tokens)
    return True


async def begun(answer: asyncio.Task[httpx.Response], num_steps: list[int]) -> None:
    await eventually(lambda: answer.done() or max(num_steps, default=0) >= 5, "the stream has begun")


@pytest.mark.thorough
async def test_a_target_is_not_left_because_this_process_was_stopped(clusters: ClusterFactory) -> None:
    steps: list[int] = []
    targets = [clusters.target(step_s=0.02) for _ in range(2)]
    for target in targets:
        target.may_step = partial(noted, steps)
    async with clusters.open(targets, settings={"target_silence_max_s": SILENCE_S}) as cluster:
        answer = asyncio.create_task(cluster.complete(max_tokens=NUM_TOKENS))
        await begun(answer, steps)
        hold_up()
        assert (await answer).json()["usage"]["completion_tokens"] == NUM_TOKENS
        assert cluster.service.catalog.exclusions() == []
    assert sum(len(target.requests) for target in targets) == 1


@pytest.mark.thorough
async def test_a_draft_worker_is_not_let_go_because_this_process_was_stopped(
    clusters: ClusterFactory,
) -> None:
    target, draft, steps = clusters.target(step_s=0.02, num_draft_tokens=1), FakeDraft(), list[int]()
    target.may_step = lambda num_tokens: noted(steps, num_tokens) and bool(draft.requests)
    async with clusters.open([target], [draft], settings={"draft_silence_max_s": SILENCE_S}) as cluster:
        answer = asyncio.create_task(cluster.complete(max_tokens=NUM_TOKENS, speculation={"always": True}))
        await begun(answer, steps)
        hold_up()
        assert (await answer).status_code == 200
        assert cluster.service.catalog.exclusions() == []
    assert len(draft.requests) == 1


def test_silence_that_is_a_workers_own_is_found_out_after_a_pause_as_well() -> None:
    """In virtual time: 3 s run, 60 s stopped, and then as long as anybody may be silent."""
    loop, cut_at = SimulatedLoop(), list[float]()

    async def watching() -> None:
        lag = LoopLag()
        watch = SilenceWatch(lambda: cut_at.append(loop.time()), 20.0, lag)
        watch.start()
        watch.begin()
        while not cut_at:
            lag.tick(loop.time())
            # The loop itself cannot be stopped here; that no tick comes is what a pause is.
            await asyncio.sleep(60.0 if loop.time() == pytest.approx(3.0) else TICK_S)

    loop.run_until_complete(watching())
    loop.close()
    assert cut_at == [pytest.approx(83.0, abs=1.0)]


@pytest.mark.parametrize("has_been_stopped", [True, False])
async def test_a_connection_that_broke_during_a_pause_is_no_fault_of_the_target(
    clusters: ClusterFactory, has_been_stopped: bool
) -> None:
    mortal, heir = clusters.target(dies_at=4), clusters.target()
    async with clusters.open([mortal, heir], settings={"quarantine_s": 60.0}) as cluster:
        lag, now_s = cluster.service.environment.loop.lag, asyncio.get_running_loop().time()
        if has_been_stopped:
            lag.tick(now_s - 10.0)
            lag.tick(now_s)
        for _ in range(50):
            answer = await cluster.complete()
            assert answer.json()["usage"]["completion_tokens"] == 12, "no token is lost"
            if mortal.num_died:
                break
        assert mortal.num_died
        assert bool(cluster.service.catalog.exclusions()) != has_been_stopped


@pytest.mark.thorough
async def test_a_coordinator_stopped_and_continued_replays_nothing(clusters: ClusterFactory) -> None:
    """A process of its own, with SIGSTOP and SIGCONT; its targets are here, and go on meanwhile."""
    steps: list[int] = []
    targets = [clusters.target(step_s=0.05) for _ in range(2)]
    for target in targets:
        target.may_step = partial(noted, steps)
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(target)) for target in targets]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.coordinator.stopped_coordinator", str(clusters.model_dir), *addresses,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(await process.stdout.readline())}"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            body = {"prompt": "import", "temperature": 0, "max_tokens": 150}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            await begun(answer, steps)
            process.send_signal(signal.SIGSTOP)
            assert STOPPED_S > 2 * SILENCE_MAX_S
            await asyncio.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
            assert (await answer).json()["usage"]["completion_tokens"] == 150
            assert (await client.get("/health")).json()["excluded_workers"] == []
        finally:
            process.kill()
            await process.wait()
    assert sum(len(target.requests) for target in targets) == 1


def test_a_loss_by_our_own_pause_is_told_from_a_workers_death(clusters: ClusterFactory) -> None:
    from coordinator.workers.silence import is_own_loss

    def lost(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
        nothing = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(code, nothing, nothing, details, details)

    async def told() -> list[bool]:
        lag, now_s = LoopLag(), asyncio.get_running_loop().time()
        broken = lost(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        before = is_own_loss(broken, lag)
        lag.tick(now_s - 60.0)
        lag.tick(now_s)
        unreachable = lost(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: refused")
        failed = lost(grpc.StatusCode.INTERNAL, "a bug")
        return [before, *(is_own_loss(each, lag) for each in (broken, unreachable, failed))]

    assert asyncio.run(told()) == [False, True, False, False]


@pytest.mark.thorough
async def test_a_slot_that_came_with_the_end_of_the_wait_is_taken(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lie ready when a loop that was held up goes on, and the timer is looked at first."""
    target = clusters.target(step_s=0.02)
    async with clusters.open([target], settings={"queue_wait_max_s": QUEUE_WAIT_S}, max_num_seqs=1) as cluster:
        leave = Admission.leave

        def leave_and_be_held_up(self: Admission, model: str, slot: Slot) -> None:
            leave(self, model, slot)
            hold_up(QUEUE_WAIT_S + 0.2)

        monkeypatch.setattr(Admission, "leave", leave_and_be_held_up)
        first = asyncio.create_task(cluster.complete(max_tokens=8))
        await eventually(lambda: target.num_open == 1, "the only slot is taken")
        second = asyncio.create_task(cluster.complete(max_tokens=8))
        assert (await first).status_code == 200
        assert (await second).status_code == 200
