"""Sends load to servers: closed and open loops around `observe`, turn after turn.

Every wait is bounded: a request by `timeout_s`, a turn by its requests or its duration plus one `timeout_s`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace

import httpx

from command_line.bench.cells import TurnResult
from command_line.load.load import Level, Loop, Plan, Turn, arrivals, turns
from command_line.load.prompts import Workload
from command_line.load.requests import Server, new_bench_client, observe
from command_line.load.servers import find_model
from command_line.load.summary import MS_PER_S, RequestResult

# Pause after a failure. Without it a closed loop would spin on a server that refuses everything.
FAILURE_PAUSE_S = 0.1
PULSE_S = 0.02

OnRequest = Callable[[Turn, int], None]  # number of counted requests of the turn that have ended


@asynccontextmanager
async def ready_servers(
    servers: Sequence[Server], *, model: str | None, api_key: str | None, timeout_s: float
) -> AsyncIterator[tuple[httpx.AsyncClient, tuple[Server, ...]]]:
    """A client, and the servers with their models. Raises ConfigurationError for a server that is down."""
    with _room_for_sockets():
        async with new_bench_client(timeout_s, api_key) as client:
            yield client, tuple([await find_model(client, server, model) for server in servers])


async def run_turns(
    client: httpx.AsyncClient,
    servers: Sequence[Server],
    plan: Plan,
    workload: Workload,
    *,
    timeout_s: float,
    on_request: OnRequest,
) -> AsyncIterator[TurnResult]:
    """Runs every turn of the plan, one after another, each with its warm-up."""
    for turn in turns(plan, len(servers)):
        load = _Load(client, servers[turn.server], turn, plan, workload, timeout_s, on_request)
        yield await load.run()


@dataclass(frozen=True, slots=True)
class _Load:
    """Load of one turn."""

    client: httpx.AsyncClient
    server: Server
    turn: Turn
    plan: Plan
    workload: Workload
    timeout_s: float
    on_request: OnRequest

    async def run(self) -> TurnResult:
        level = self.turn.level
        num_warmup = self.plan.num_warmup_at(level)
        if num_warmup:
            # All at once, even in an open loop: the warm-up is for connections and kernels.
            num_at_once = int(level.value) if level.loop is Loop.CLOSED else min(num_warmup, 8)
            await self._closed(num_at_once, num_warmup, None, lambda num_ended: None)
        num_requests, duration_s = self.plan.num_requests_at(level), self.plan.duration_s

        def on_ended(num_ended: int) -> None:
            self.on_request(self.turn, num_ended)

        on_ended(0)
        pulse = _Pulse()
        with _quiet_collector():
            watching = asyncio.create_task(pulse.watch())
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            try:
                if level.loop is Loop.CLOSED:
                    results = await self._closed(int(level.value), num_requests, duration_s, on_ended)
                else:
                    results = await self._open(level, num_requests, duration_s, on_ended)
            finally:
                watching.cancel()
            took_s = time.perf_counter() - began_s
            cpu_share = (time.process_time() - began_cpu_s) / took_s if took_s > 0 else 0.0
        by_index = tuple(sorted(results, key=lambda result: result.index))
        return TurnResult(self.turn, by_index, cpu_share, pulse.stall_ms_max)

    async def _one(self, index: int) -> RequestResult:
        url = self.server.url + self.workload.path
        body = self.workload.body(self.server.model, index)
        return await observe(self.client, url, body, index=index, timeout_s=self.timeout_s)

    async def _closed(
        self,
        num_at_once: int,
        num_requests: int | None,
        duration_s: float | None,
        on_ended: Callable[[int], None],
    ) -> list[RequestResult]:
        """Keeps a fixed number of requests in flight until all are done or the time is up."""
        indices: Iterator[int] = itertools.count() if num_requests is None else iter(range(num_requests))
        end_s = None if duration_s is None else time.perf_counter() + duration_s
        results: list[RequestResult] = []

        async def worker() -> None:
            for index in indices:
                result = await self._one(index)
                results.append(result)
                on_ended(len(results))
                if not result.is_ok:
                    await asyncio.sleep(FAILURE_PAUSE_S)
                if end_s is not None and time.perf_counter() >= end_s:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once if num_requests is None else min(num_at_once, num_requests)):
                group.create_task(worker())
        return results

    async def _open(
        self,
        level: Level,
        num_requests: int | None,
        duration_s: float | None,
        on_ended: Callable[[int], None],
    ) -> list[RequestResult]:
        """Sends each request at its arrival time, however many are in flight."""
        # All servers of a round get the same arrivals; every round gets others.
        seed = f"{self.plan.seed}/{level.value}/{self.turn.number}"
        results: list[RequestResult] = []
        began_s = time.perf_counter()

        async def one(index: int, due_s: float) -> None:
            result = await self._one(index)
            results.append(replace(result, late_s=max(0.0, result.sent_s - due_s)))
            on_ended(len(results))

        due = arrivals(level.value, seed=seed, num_requests=num_requests, duration_s=duration_s)
        async with asyncio.TaskGroup() as group:
            for index, offset_s in enumerate(due):
                due_s = began_s + offset_s
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(one(index, due_s))
        return results


class _Pulse:
    """Notices when this process does not run, because it is busy or not scheduled: time stamps are late by that."""

    def __init__(self) -> None:
        self.stall_ms_max = 0.0

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            due_s = time.perf_counter() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.stall_ms_max = max(self.stall_ms_max, (time.perf_counter() - due_s) * MS_PER_S)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Excludes existing objects from Python's garbage collection, whose pauses would look like gaps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _room_for_sockets() -> Iterator[None]:
    """Raises the limit of open files to the maximum: the usual 1024 are too few for the sockets of an open loop."""
    limits: tuple[int, int] | None = None
    # Some systems have no such limits or do not allow a change. Connections then fail with a clear error.
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limits = soft, hard
    try:
        yield
    finally:
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
