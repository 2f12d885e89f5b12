"""The simulated network keeps what real ones promise."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from protos.outrider.v1 import common_pb2
from tests.simulation.calls import Held
from tests.simulation.clock import SimulatedLoop
from tests.simulation.network import EOF, Method, Network, make_task
from tests.simulation.process import Process


@pytest.mark.parametrize("joins", list(itertools.permutations([("c", "*"), ("c", "t"), ("t", "*")])))
def test_cuts_that_overlap_keep_the_order_of_what_they_hold(joins: tuple[tuple[str, str], ...]) -> None:
    with closing(SimulatedLoop()) as loop:
        network = Network(loop, random.Random(0), lambda details, error: None)
        call: Any = SimpleNamespace(client=SimpleNamespace(name="c", is_alive=True), host="t", server=None)
        came: list[int] = []
        for number, cut in enumerate(sorted(joins)):
            network.cut(*cut)
            network.come_in(Held(call, True, partial(came.append, number)))
        for join in joins:
            assert not came
            network.join(*join)
        assert came == [0, 1, 2]


class Pair:
    """A client and a server that says as much as it may."""

    def __init__(self, loop: SimulatedLoop, window: int = 256) -> None:
        self.loop = loop
        self.network = Network(loop, random.Random(0), lambda details, error: None, slow_share=0.0, window=window)
        self.client, self.server = Process("c", loop), Process("t", loop)
        self.num_said = 0
        self.server.methods["Say"] = Method(self.say, common_pb2.GetInfoRequest, common_pb2.WorkerInfo)
        self.network.start(self.server)

    async def say(self, request: Any, context: Any) -> AsyncIterator[common_pb2.WorkerInfo]:
        while self.num_said < 100:
            yield common_pb2.WorkerInfo(vocab_size=self.num_said)
            self.num_said += 1
            await asyncio.sleep(0.1)

    def call(self) -> Any:
        request = common_pb2.GetInfoRequest()
        return self.network.stream(self.client, "t:1", "Say", request, common_pb2.WorkerInfo)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await self.client.start(work())
            self.server.end()
            self.client.end()
            await asyncio.sleep(0.1)

        self.loop.run_until_complete(main())


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    with closing(SimulatedLoop()) as loop:
        loop.set_task_factory(make_task)
        yield loop


def test_a_server_waits_while_its_client_does_not_read(loop: SimulatedLoop) -> None:
    pair = Pair(loop, window=4)

    async def work() -> None:
        call = pair.call()
        await asyncio.sleep(2.0)
        assert pair.num_said == 4
        for number in range(10):
            assert (await call.read()).vocab_size == number
        await asyncio.sleep(2.0)
        assert pair.num_said == 14
        call.cancel()

    pair.run(work)


def test_what_is_cut_one_way_still_comes_the_other_way(loop: SimulatedLoop) -> None:
    pair = Pair(loop)

    async def work() -> None:
        call = pair.call()
        await call.read()
        pair.network.cut("c", "t", is_one_way=True)
        number = pair.num_said
        await call.read()
        assert pair.num_said > number
        pair.network.join("c", "t")
        pair.network.cut("t", "c", is_one_way=True)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(1.0)
        assert not reading.done()
        pair.network.join("t", "c")
        assert await reading is not EOF
        call.cancel()

    pair.run(work)


def test_a_stopped_process_does_nothing_and_goes_on_with_its_timers_first(loop: SimulatedLoop) -> None:
    pair = Pair(loop)
    seen: list[str] = []

    async def read(call: Any) -> None:
        while await call.read() is not EOF:
            seen.append("message")

    async def sleep() -> None:
        while True:
            await asyncio.sleep(0.5)
            seen.append("timer")

    async def work() -> None:
        call = pair.call()
        stopped = Process("c", loop)
        call.client = stopped  # what comes is for the one that will be stopped
        tasks = [stopped.start(read(call)), stopped.start(sleep())]
        await asyncio.sleep(0.7)
        before = list(seen)
        assert before.count("timer") == 1
        pair.network.freeze(stopped)
        await asyncio.sleep(2.0)
        assert seen == before, "nothing of it runs"
        stopped.thaw()
        await asyncio.sleep(0.05)
        assert seen[len(before)] == "timer"
        assert seen[len(before) :].count("timer") == 1, "one that was due several times over was due once"
        assert seen[len(before) :].count("message") > 10
        stopped.end()
        await asyncio.wait(tasks)

    pair.run(work)
