"""A fixed number of clients that ask all the time, and the right answers that they know beforehand."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.certificates import TENANTS
from tests.e2e.chaos.client import SILENCE_S_MAX, Client
from tests.e2e.chaos.verdict import SEVERITY, Answer, Kind, Right, Verdict, common_len, judge

LEAVING_SHARE = 0.08  # of requests whose client goes away in between
LEAVING_AFTER_S = (0.0, 1.5)
LEARNED_AT_ONCE = 6

OnAnswer = Callable[[Case, Answer, Verdict], None]


class NotReproducible(Exception):
    """Two undisturbed workers do not say the same: nothing could be compared with either."""


class Learner:
    """Finds out what is right on a fleet that nobody disturbs, without speculation."""

    def __init__(self, client: Client, targets: Sequence[grpc.aio.Channel]) -> None:
        """Every answer that the client gets is compared with that of a worker asked directly, each in turn; one of
        several texts, which are the coordinator's to make, with another answer of the client's."""
        self._client = client
        self._targets = targets

    async def learn(self, cases: Sequence[Case]) -> dict[str, tuple[Right, ...]]:
        """The texts of each case, by the cases' names. Raises NotReproducible."""
        turns = asyncio.Semaphore(LEARNED_AT_ONCE)

        async def learn(index: int, case: Case) -> tuple[str, tuple[Right, ...]]:
            async with turns:
                return case.name, await self._learn(case, index)

        return dict(await asyncio.gather(*(learn(index, case) for index, case in enumerate(cases))))

    async def _learn(self, case: Case, index: int) -> tuple[Right, ...]:
        answer = await self._ask(case)
        if case.n > 1:
            others = [choice.token_ids for choice in (await self._ask(case)).choices]
        else:
            others = [await self._ask_worker(self._targets[index % len(self._targets)], case)]
        for choice, again in zip(answer.choices, others, strict=True):
            num_same = common_len(choice.token_ids, again)
            # The worker knows nothing of stop strings and goes on.
            if num_same < len(choice.token_ids) or (not case.stop and len(again) > num_same):
                raise NotReproducible(f"{case.name}: another worker differs from token {num_same} on")
        return answer.as_right()

    async def _ask(self, case: Case) -> Answer:
        answer = await self._client.ask(case, speculation="off")
        if answer.error is not None or answer.incidents or not answer.is_complete:
            raise NotReproducible(f"{case.name}: {answer.error} {answer.incidents}")
        return answer

    async def _ask_worker(self, channel: grpc.aio.Channel, case: Case) -> list[int]:
        prompt = (await self._client.post("/tokenize", {"prompt": case.prompt}))["tokens"]
        request = target_pb2.GenerateRequest(
            session_id=uuid.uuid4().hex,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=case.sampling_message(),
            speculation=common_pb2.SpeculationParams(enabled=False, plain=True),
        )
        token_ids: list[int] = []
        async for event in target_pb2_grpc.TargetStub(channel).Generate(request, timeout=SILENCE_S_MAX):
            token_ids += event.step.token_ids
        return token_ids


class Load:
    """The clients. Each asks for something, reads the answer to its end (mostly), has it judged, and asks again."""

    def __init__(
        self,
        client: Client,
        cases: Sequence[Case],
        known: Mapping[str, Sequence[Right]],
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
        # What is right beside what is known: texts of other weights, while there are any.
        self.other_rights: Callable[[Case, Answer], Sequence[Right] | None] = lambda case, answer: None
        self._num_asking = 0  # clients whose number is lower may ask

    @asynccontextmanager
    async def asking(self, num_clients: int) -> AsyncIterator[None]:
        """Leaving waits until the last answer is complete, unless it is an error that leaves."""
        self._num_asking = num_clients
        async with asyncio.TaskGroup() as clients:
            for index in range(num_clients):
                clients.create_task(self._keep_asking(index))
            yield
            self._is_ending = True

    def ask_with(self, num_clients: int) -> None:
        """No more than so many clients ask from now on; the others finish what they have."""
        self._num_asking = num_clients

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

    def judge(self, case: Case, answer: Answer) -> Verdict:
        """Compares an answer with whatever is right at its time."""
        verdict = judge(answer, self.known[case.name])
        if verdict.kind is not Kind.RIGHT and (others := self.other_rights(case, answer)) is not None:
            return min(verdict, judge(answer, others), key=lambda each: SEVERITY[each.kind])
        return verdict

    async def _keep_asking(self, index: int) -> None:
        while not self._is_ending:
            if index >= self._num_asking:
                await asyncio.sleep(0.2)
                continue
            case = self._rng.choice(self.cases)
            edge = self._rng.choice(("http", "grpc"))
            tenant = self._rng.choice(TENANTS)
            speculation = self._rng.choice(("on", "on", "always", "off"))
            leave_after_s = None
            if self._rng.random() < LEAVING_SHARE:
                leave_after_s = self._rng.uniform(*LEAVING_AFTER_S)
            self._asked_s[index] = time.monotonic()
            leave = self._leaving[index] = asyncio.Event()
            answer = await self._client.ask(
                case,
                edge=edge,
                tenant=tenant,
                speculation=speculation,
                leave_after_s=leave_after_s,
                leave=leave,
            )
            del self._asked_s[index]
            self._leaving.pop(index, None)
            self._on_answer(case, answer, self.judge(case, answer))
            if answer.error is not None:
                await asyncio.sleep(0.2)  # as a client that was refused would
