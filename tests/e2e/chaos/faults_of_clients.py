"""Clients that do not read, that read too slowly, that share a request id, and one whose text kills."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar, Final

import httpx
import psutil

from coordinator.recovery.poison import LOSSES_MAX, NOTED_S
from demo.corpus import held_out_prompts
from tests.e2e.chaos import poison
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.fleet import Worker
from tests.e2e.chaos.ledger import MAX_LOST
from tests.e2e.chaos.own_requests import Door, Refusal, doors, events
from tests.e2e.chaos.slow_clients import Ending, Unread, UnreadGrpc, UnreadHttp
from tests.e2e.chaos.verdict import Answer, Right

BYTES_PER_S: Final = 100
READ_AFTER: Final = (1.9, 8.0)
"""Times the limit of a client's pace. At twice the limit a connection may be cut; until then its client is told."""
BEGIN_S: Final = 120.0  # beyond the time that anybody waits for a slot
REST_S: Final = 60.0
HEARD_S: Final = 1.0  # while a process that ends is still there
HEARD_S_MAX: Final = 30.0  # until its end is known to whoever started it
OTHERS_MAX: Final = 2  # targets that die of other faults meanwhile, which cannot be told apart
STEP_TOKENS_MAX: Final = 9
ATTEMPTS_MAX: Final = 160  # of half a second, while a coordinator is started again
TWIN_TOKENS_MAX: Final = 150  # more take minutes in a fleet that is full, and show nothing else
EXPLICIT: Final = frozenset({429, 503})
_LOSE_TARGETS: Final = ("redis", "certificates", "coordinator")
"""Parts of the fleet whose faults take targets away, from all coordinators or from one."""


class _SlowReaders(Fault):
    """Requests for much output whose clients hold the connection and hardly read, enough of them to fill a target.

    Each ends by what it reads at last: `slow_reader` (ABORTED), or all of its output where it came to read in time.
    What others may see is a wait or a refusal, for these requests take slots for as long as the limit says.
    """

    part, costs = "clients", Costs.CAPACITY
    edges: ClassVar[tuple[str, ...]] = ("HTTP", "gRPC")
    bytes_per_s: ClassVar[int] = 0

    async def run(self, worker: Worker | None) -> None:
        num_clients, began_s = self.rng.randint(3, 5), time.monotonic()
        own_doors = doors(self.fleet, self.rng)
        prompts = held_out_prompts(num_clients, seed=self.rng.randrange(1 << 30), chars_max=200)
        plans = [
            (self.rng.choice(own_doors), self.rng.choice(self.edges), prompt, READ_AFTER[index % 2])
            for index, prompt in enumerate(prompts)
        ]
        loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(num_clients)
        try:
            endings = await asyncio.gather(*(loop.run_in_executor(threads, self._ask, *plan) for plan in plans))
        finally:
            threads.shutdown(wait=False)  # the relays of everybody's connections run on this loop
        counts = Counter(ending.what for ending in endings)
        kinds = Counter(edge for _, edge, _, _ in plans)
        self.describe(", ".join(f"{count} {what}" for what, count in (kinds + counts).items()))
        if self.fleet.may_break_connections(began_s):
            return  # nobody can tell what was cut for which reason
        for (_, _, _, read_after), ending in zip(plans, endings, strict=True):
            if ending.what == "cut" and read_after > 2:
                continue
            if ending.what in ("cut", "hung") or (ending.what == "refused" and not _is_explicit(ending)):
                self.fleet.surprises.append(f"{self.name}: a client was not told why: {ending}")

    def _ask(self, door: Door, edge: str, prompt: str, read_after: float) -> Ending:
        limit_s = self.fleet.options.client_stall_max_s
        client: Unread
        try:
            if edge == "gRPC":
                client = UnreadGrpc(door.grpc_address, door.key, door.credentials, prompt)
            else:
                client = UnreadHttp(door.http_url, door.key, door.context, prompt)
        except OSError as error:
            return Ending("cut", f"not reached: {type(error).__name__}: {error}")
        try:
            ending = client.read_beginning(BEGIN_S)
            if ending is None:
                until_s = time.monotonic() + read_after * limit_s
                ending = client.read_slowly(self.bytes_per_s, until_s)
            return ending or client.read_rest(REST_S)
        finally:
            client.close()


class ClientsDoNotRead(_SlowReaders):
    """Clients that ask for eight sequences of 500 tokens with log probabilities and read none of it."""

    name = "clients do not read"


class ClientsReadSlowly(_SlowReaders):
    """The same, reading 100 bytes a second, which is less than is generated."""

    name, bytes_per_s = "clients read slowly", BYTES_PER_S


def _is_explicit(ending: Ending) -> bool:
    return any(word in ending.words for word in ("429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"))


class _Poison(Fault):
    """A prompt that kills whichever target computes it.

    Its client is told so (503 `poisonous_request`) after three workers at most, or a few more where others die as well.
    Others lose no token; new requests may wait or be refused while the targets that died start again.
    """

    needs_own_engine = True
    part, costs = "targets", Costs.CAPACITY
    num_steps: ClassVar[int]

    async def run(self, worker: Worker | None) -> None:
        body = {
            "prompt": poison.prompt(self.num_steps, self.rng),
            "max_tokens": LOSSES_MAX * poison.AFTER_A_FEW * STEP_TOKENS_MAX,  # more than it can get
            "temperature": 0,
            "ignore_eos": True,
        }
        door = self.rng.choice(doors(self.fleet, self.rng))
        refusal, num_tokens = None, 0
        targets = [each.name for each in self.fleet.of_role("target")]
        since_s = time.monotonic() - NOTED_S
        with self.fleet.expecting_ends(targets) as deaths:
            async with door.http() as http:
                for _ in range(ATTEMPTS_MAX):
                    refusal, num_tokens = await _refusal_of(http, body)
                    if refusal is None or refusal.code == "poisonous_request":
                        break
                    if deaths and not self._are_others_lost(since_s):
                        break
                    # There was no room for it yet, or chance explains what it has cost.
                    await asyncio.sleep(0.5)
            await self._until_ends_are_heard()
        self.describe(f"{len(deaths)} targets lost, {num_tokens} tokens")
        if refusal is None or refusal.code != "poisonous_request":
            self.fleet.surprises.append(f"{self.name}: its client was not told: {refusal}; lost {deaths}")
        num_max = LOSSES_MAX + OTHERS_MAX if self._are_others_lost(since_s) else MAX_LOST
        if not 1 <= len(deaths) <= num_max:
            self.fleet.surprises.append(f"{self.name}: {len(deaths)} workers were lost to it: {deaths}")

    async def _until_ends_are_heard(self) -> None:
        await asyncio.sleep(HEARD_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S_MAX):
                while any(  # noqa: ASYNC110 - it has no event
                    each.is_ready and not psutil.pid_exists(each.pid) for each in self.fleet.of_role("target")
                ):
                    await asyncio.sleep(0.05)

    def _are_others_lost(self, since_s: float) -> bool:
        parts = [*(each.name for each in self.fleet.of_role("target")), *_LOSE_TARGETS]
        return self.fleet.was_returned(self.part, since_s) or any(
            self.fleet.is_touched(name, since_s) for name in parts
        )


class PoisonAtOnce(_Poison):
    """A text that kills whichever target has it, before its first token."""

    name, num_steps = "poison text, at once", poison.AT_ONCE


class PoisonLater(_Poison):
    """A text that kills whichever target has it, after a few tokens there."""

    name, num_steps = "poison text, after a few tokens", poison.AFTER_A_FEW


async def _refusal_of(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Refusal | None, int]:
    """Returns the refusal that the request ends with, None if it is complete, and the number of tokens before it."""
    num_tokens = 0
    try:
        async for _, event in events(http, {**body, "return_token_ids": True}):
            num_tokens += sum(len(choice.get("token_ids") or []) for choice in event["choices"])
    except Refusal as refusal:
        return refusal, num_tokens
    except httpx.HTTPError as error:
        return Refusal(0, "broken", f"{type(error).__name__}: {error}"), num_tokens
    return None, num_tokens


@dataclass
class _Twin:
    """One of several requests of one id."""

    case: Case
    right: Right
    door: Door
    others: Iterator[Door]  # where it comes back, one after the other, with the last event's id
    leaves_after: int  # tokens; it leaves as well when its door is closed
    answer: Answer
    event_id: str = ""
    end: str = ""
    """How it ended: complete, or a refusal in words."""


class OneIdTwice(Fault):
    """Requests of one id, equal ones and others, at two coordinators at once; some break off and go on at another.

    Each gets its own text or an explicit refusal (409, or 429 and 503 where there is no room), never the other's.
    """

    name, part = "one id at two coordinators", "request id"

    async def run(self, worker: Worker | None) -> None:
        counts: Counter[str] = Counter()
        for _ in range(self.rng.randint(1, 2)):
            twins = self._draw()
            request_id = f"twin-{uuid.UUID(int=self.rng.getrandbits(128)).hex}"
            await asyncio.gather(*(self._ask(twin, request_id) for twin in twins))
            for twin in twins:
                counts[twin.end.partition(" ")[0]] += 1
                self._judge(twin, request_id)
        self.describe(", ".join(f"{count} {end}" for end, count in sorted(counts.items())))

    def _draw(self) -> list[_Twin]:
        own_doors = doors(self.fleet, self.rng)
        cases = [
            (case, self.load.known[case.name][0])
            for case in self.load.cases
            if case.n == 1 and case.max_tokens <= TWIN_TOKENS_MAX
        ]
        is_same = self.rng.random() < 0.5
        first = self.rng.choice(cases)
        picked = [first, first if is_same else self.rng.choice(cases)]
        return [
            _Twin(
                *(case, right, own_doors[index % len(own_doors)]),
                others=cycle(self.rng.sample(own_doors, len(own_doors))),
                leaves_after=self.rng.randint(0, 40),
                answer=Answer(time.monotonic()),
            )
            for index, (case, right) in enumerate(picked)
        ]

    async def _ask(self, twin: _Twin, request_id: str) -> None:
        body, headers = twin.case.body("on"), {"X-Request-Id": request_id}
        door, leaves_after, (got,) = twin.door, twin.leaves_after, twin.answer.choices
        for _ in range(ATTEMPTS_MAX):
            try:
                async with door.http() as http:
                    async for event_id, event in events(http, body, headers):
                        twin.event_id = event_id
                        for choice in event["choices"]:
                            got.token_ids += choice.get("token_ids") or []
                            got.text += choice.get("text") or ""
                        if 0 < leaves_after <= len(got.token_ids):
                            break
                    else:
                        twin.end = "complete"
                        return
            except Refusal as refusal:
                if refusal.status not in EXPLICIT and refusal.status != 200:
                    twin.end = str(refusal)
                    return
                await asyncio.sleep(0.5)
            except httpx.HTTPError as error:
                twin.end, door = f"0 {type(error).__name__}: {error}", next(twin.others)
                await asyncio.sleep(0.5)
            else:
                door, leaves_after = next(twin.others), 0
            if twin.event_id:
                headers["Last-Event-ID"] = twin.event_id
        twin.end = twin.end or "429 too often"

    def _judge(self, twin: _Twin, request_id: str) -> None:
        twin.answer.ended_s, (got,) = time.monotonic(), twin.answer.choices
        rights = [twin.right, *(self.load.other_rights(twin.case, twin.answer) or ())]
        begun = [
            right
            for right in rights
            if got.token_ids == list(right.token_ids[: len(got.token_ids)]) and right.text.startswith(got.text)
        ]
        is_whole = any(len(got.token_ids) == len(right.token_ids) and got.text == right.text for right in begun)
        if not begun or (twin.end == "complete" and not is_whole):
            self.fleet.surprises.append(
                f"{self.name}: {request_id}: {twin.case.name} got what is not its own: {got.token_ids[-8:]} "
                f"({twin.end})"
            )
        elif not twin.end.startswith(("complete", "409", "429", "503")):
            self.fleet.surprises.append(f"{self.name}: {request_id}: {twin.case.name}: {twin.end}")


FAULTS_OF_CLIENTS: Final[tuple[type[Fault], ...]] = (
    ClientsDoNotRead, ClientsReadSlowly, PoisonAtOnce, PoisonLater, OneIdTwice,
)  # fmt: skip
