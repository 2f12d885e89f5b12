"""A fixed number of clients that ask all the time, and the right answers that they know beforehand."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.verdict import Answer, Right, Verdict, common_len, judge

LEAVING_SHARE = 0.08  # of requests whose client goes away in between
LEAVING_AFTER_S = (0.0, 1.5)

OnAnswer = Callable[[Case, Answer, Verdict], None]


class NotReproducible(Exception):
    """Two undisturbed workers do not say the same: nothing could be compared with either."""


class Learner:
    """Finds out what is right on a fleet that nobody disturbs, without speculation."""

    def __init__(self, client: Client, worker_addresses: Sequence[str]) -> None:
        """Every answer that the client gets is compared with that of some worker asked directly, each in turn."""
        self._client = client
        self._addresses = worker_addresses

    async def learn(self, cases: Sequence[Case]) -> dict[str, Right]:
        """By the cases' names. Raises NotReproducible."""
        known = {}
        for index, case in enumerate(cases):
            answer = await self._client.ask(case, speculation="off")
            if answer.error is not None or answer.finish_reason is None:
                raise NotReproducible(f"{case.name}: {answer.error}")
            address = self._addresses[index % len(self._addresses)]
            again = await self._ask_worker(address, case)
            num_same = common_len(answer.token_ids, again)
            # The worker knows nothing of stop strings and goes on.
            if num_same < len(answer.token_ids) or (not case.stop and len(again) > num_same):
                raise NotReproducible(f"{case.name}: another worker differs from token {num_same} on")
            known[case.name] = Right(
                tuple(answer.token_ids), answer.text, answer.finish_reason, answer.stop_string
            )
        return known

    async def _ask_worker(self, address: str, case: Case) -> list[int]:
        prompt = (await self._client.post("/tokenize", {"prompt": case.prompt}))["tokens"]
        request = target_pb2.GenerateRequest(
            session_id=uuid.uuid4().hex,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=case.sampling_message(),
            speculation=common_pb2.SpeculationParams(enabled=False, plain=True),
        )
        token_ids: list[int] = []
        async with grpc.aio.insecure_channel(address) as channel:
            async for event in target_pb2_grpc.TargetStub(channel).Generate(request, timeout=60):
                token_ids += event.step.token_ids
        return token_ids


class Load:
    """The clients. Each asks for something, reads the answer to its end (mostly), has it judged, and asks again."""

    def __init__(
        self,
        client: Client,
        cases: Sequence[Case],
        known: dict[str, Right],
        rng: random.Random,
        on_answer: OnAnswer,
    ) -> None:
        self._client = client
        self.cases = cases
        self.known = known
        self._rng = rng
        self._on_answer = on_answer
        self._asked_s: dict[int, float] = {}  # requests under way, by client
        self._leaving: dict[int, asyncio.Event] = {}
        self._is_ending = False

    @asynccontextmanager
    async def asking(self, num_clients: int) -> AsyncIterator[None]:
        """Leaving waits until the last answer is complete, unless it is an error that leaves."""
        async with asyncio.TaskGroup() as clients:
            for index in range(num_clients):
                clients.create_task(self._keep_asking(index))
            yield
            self._is_ending = True

    @property
    def oldest_open_s(self) -> float:
        """When the oldest request under way was asked; now, if there is none."""
        return min(self._asked_s.values(), default=time.monotonic())

    def hang_up(self) -> int:
        """All clients leave whatever they are reading; they ask again at once. Returns how many there were."""
        leaving, self._leaving = self._leaving, {}
        for event in leaving.values():
            event.set()
        return len(leaving)

    async def _keep_asking(self, index: int) -> None:
        while not self._is_ending:
            case = self._rng.choice(self.cases)
            edge = self._rng.choice(("http", "grpc"))
            speculation = self._rng.choice(("on", "on", "always", "off"))
            leave_after_s = None
            if self._rng.random() < LEAVING_SHARE:
                leave_after_s = self._rng.uniform(*LEAVING_AFTER_S)
            self._asked_s[index] = time.monotonic()
            leave = self._leaving[index] = asyncio.Event()
            answer = await self._client.ask(
                case, edge=edge, speculation=speculation, leave_after_s=leave_after_s, leave=leave
            )
            del self._asked_s[index]
            self._leaving.pop(index, None)
            self._on_answer(case, answer, judge(answer, self.known[case.name]))
            if answer.error is not None:
                await asyncio.sleep(0.2)  # as a client that was refused would
