"""One run: a system, inputs of every kind in a mix, a judgement of every answer, and what is left at the end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from schemathesis import GenerationMode

from tests.e2e.fuzz import footprint, grpc_inputs, http_inputs, openapi_inputs, stream_inputs
from tests.e2e.fuzz.footprint import Footprint
from tests.e2e.fuzz.inputs import Input, to_json
from tests.e2e.fuzz.lag import LAG_MAX_S, LagTable, Reading
from tests.e2e.fuzz.sending import Sender, Verdict
from tests.e2e.secured import SecuredOptions, SecuredSystem
from tests.e2e.tables import markdown_table

COORDINATOR = "coordinator-0"
CHECKS = "good requests in between"
LOOK_EVERY_S = 0.5
ALONE_TIMES = 3  # each input is sent again that was in flight while the loop was late
SUSPECTS_MAX = 400
FAILURES_SHOWN = 40
IN_FLIGHT_SHOWN = 12
QUIET_S = 1.0  # before the first and after the last input, so that each has a whole window

# Shares of the mix.
MAKERS: dict[str, tuple[float, Callable[[dict[str, Any], int, int], Sequence[Input]]]] = {
    "documented": (
        0.12,
        lambda document, count, seed: openapi_inputs.from_document(document, GenerationMode.POSITIVE, count, seed),
    ),
    "undocumented": (
        0.12,
        lambda document, count, seed: openapi_inputs.from_document(document, GenerationMode.NEGATIVE, count, seed),
    ),
    "bodies": (0.26, lambda _, count, seed: http_inputs.near_valid(count, seed)),
    "heads": (0.12, lambda _, count, seed: http_inputs.framed(count, seed)),
    "grpc messages": (0.13, lambda _, count, seed: grpc_inputs.near_valid(count, seed)),
    "grpc bytes": (0.10, lambda _, count, seed: grpc_inputs.mutated(count, seed)),
    "grpc calls": (0.06, lambda _, count, seed: grpc_inputs.odd_calls(count, seed)),
    "grpc services": (0.03, lambda _, count, seed: grpc_inputs.services(count, seed)),
    "reconnects": (0.06, lambda _, count, seed: stream_inputs.cut_streams(count, seed)),
}


@dataclass(frozen=True)
class Plan:
    """The inputs of an experiment, and how they are sent."""

    num_inputs: int
    seed: int
    only: tuple[str, ...] = ()  # names of MAKERS; empty: all
    replayed: tuple[Input, ...] = ()  # instead of all that
    num_clients: int = 4
    check_every: int = 10  # inputs of one client between two good requests


@dataclass
class Failure:
    """An input whose answer was wrong."""

    each: Input
    fault: str

    @property
    def group(self) -> str:
        """A description that failures with the same cause share, roughly."""
        return f"{self.each.kind}: {re.sub(r'[0-9a-f]{6,}|[0-9]+', '#', self.fault)[:90]}"

    def to_json(self) -> dict[str, str]:
        return {"kind": self.each.kind, "what": self.each.what, "fault": self.fault}


@dataclass
class Outcome:
    """Results of an experiment."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)  # by kind, then status class
    failures: list[Failure] = field(default_factory=list)
    check_faults: list[str] = field(default_factory=list)
    lag: LagTable = field(default_factory=LagTable)
    late_alone: list[Failure] = field(default_factory=list)  # that hold up the loop by themselves
    growth: list[str] = field(default_factory=list)
    footprints: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether every check passed, except those of times, which a busy machine may spoil."""
        return not any((self.failures, self.check_faults, self.growth, self.ends))

    @property
    def is_clean(self) -> bool:
        return self.is_right and not self.late_alone and not self.lag.num_own_late

    def count(self, kind: str, verdict: Verdict) -> None:
        self.answers.setdefault(kind, Counter())[verdict.answer] += 1

    @property
    def num_inputs(self) -> int:
        return sum(counts.total() for kind, counts in self.answers.items() if kind != CHECKS)

    def failed(self, kind: str) -> int:
        if kind == CHECKS:
            return len(self.check_faults)
        return sum(failure.each.kind == kind for failure in self.failures)

    def markdown(self) -> str:
        """The table: a line for each kind of input."""
        rows: list[Sequence[object]] = []
        for kind in sorted(self.answers, key=lambda kind: (kind == CHECKS, kind)):
            counts = self.answers[kind]
            answers = ", ".join(f"{answer} {count}" for answer, count in sorted(counts.items()))
            worst_ms = self.lag.own_max_s.get(kind, 0.0) * 1e3
            rows.append((kind, counts.total(), answers, self.failed(kind), f"{worst_ms:.0f} ms"))
        worst_ms = max(self.lag.own_max_s.values(), default=0.0) * 1e3
        wrong = len(self.failures) + len(self.check_faults)
        rows.append(("**all inputs**", self.num_inputs, "", wrong, f"{worst_ms:.0f} ms"))
        return markdown_table("Input | sent | answers | wrong | loop held up, at most", rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "is_right": self.is_right,
            "is_clean": self.is_clean,
            "num_inputs": self.num_inputs,
            "answers": {kind: dict(counts) for kind, counts in self.answers.items()},
            "failures": [each.to_json() for each in self.failures],
            "check_faults": self.check_faults,
            "own_lag_max_s": self.lag.own_max_s,
            "lag_max_s": self.lag.any_max_s,
            "num_own_late": self.lag.num_own_late,
            "num_late": self.lag.num_late,
            "late_alone": [each.to_json() for each in self.late_alone],
            "growth": self.growth,
            "footprints": self.footprints,
            "ends": self.ends,
            "seconds": round(self.seconds, 1),
        }


def mixed(plan: Plan, document: dict[str, Any]) -> list[Input]:
    """The inputs in the order in which they are sent."""
    if plan.replayed:
        return list(plan.replayed)
    chosen = {name: made for name, made in MAKERS.items() if not plan.only or name in plan.only}
    total = sum(share for share, _ in chosen.values())
    found: list[Input] = []
    for name, (share, make) in chosen.items():
        is_last = name == list(chosen)[-1]
        count = plan.num_inputs - len(found) if is_last else round(plan.num_inputs * share / total)
        found += make(document, count, plan.seed)
    random.Random(plan.seed).shuffle(found)
    return found


class Experiment:
    """An experiment that follows one plan; `run` it once."""

    def __init__(self, plan: Plan, log_dir: Path, failure_dir: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._log_dir = log_dir
        self._failure_dir = failure_dir
        self._say = say
        self._outcome = Outcome()
        self._in_flight: dict[int, Input | None] = {}  # by client; None is a good request
        self._since_look: list[Input | None] = []  # that have begun since the last look
        self._suspects: dict[int, Input] = {}

    async def run(self) -> Outcome:
        options = SecuredOptions(max_model_len=1024)
        self._say("Starting Redis, a target, a draft and a coordinator.")
        async with SecuredSystem(options, self._log_dir) as system:
            sender = Sender(system)
            try:
                await self._run(system, sender)
            finally:
                await sender.close()
            self._outcome.ends = list(system.ends)
        return self._outcome

    async def _run(self, system: SecuredSystem, sender: Sender) -> None:
        async with system.http(system.key) as client:
            document = (await client.get("/openapi.json")).raise_for_status().json()
        inputs = mixed(self._plan, document)
        self._say(f"{len(inputs)} inputs are made; sending.")
        await sender.check("http")
        began_s = time.monotonic()
        quarter = len(inputs) // 4
        await self._send_all(system, sender, inputs[:quarter])
        await self._until_idle(system)
        before = await footprint.measure(system)
        await self._send_all(system, sender, inputs[quarter:])
        await self._until_idle(system)
        after = await footprint.measure(system)
        self._compare(before, after)
        self._outcome.seconds = time.monotonic() - began_s
        await self._send_alone(system, sender)

    async def _until_idle(self, system: SecuredSystem) -> None:
        self._outcome.growth += [f"still there: {each}" for each in await footprint.until_idle(system)]

    def _compare(self, before: Footprint, after: Footprint) -> None:
        self._outcome.growth += footprint.growth(before, after)
        self._outcome.footprints = footprint.table(before, after)

    async def _send_all(self, system: SecuredSystem, sender: Sender, inputs: Sequence[Input]) -> None:
        waiting = iter(inputs)
        looking = asyncio.create_task(self._look(system))
        try:
            clients = range(self._plan.num_clients)
            await asyncio.gather(*(self._client(index, sender, waiting) for index in clients))
            await asyncio.sleep(QUIET_S)
        finally:
            looking.cancel()
            await asyncio.wait((looking,))
        if not looking.cancelled():
            looking.result()

    async def _client(self, index: int, sender: Sender, waiting: Any) -> None:
        for num_sent, each in enumerate(waiting, 1):
            self._begin(index, each)
            verdict = await sender.send(each)
            self._outcome.count(each.kind, verdict)
            if verdict.fault is not None:
                self._fail(Failure(each, verdict.fault))
            if num_sent % self._plan.check_every == 0:
                self._begin(index, None)
                checked = await sender.check("http" if num_sent // self._plan.check_every % 2 else "grpc")
                self._outcome.count(CHECKS, checked)
                if checked.fault is not None:
                    self._say(f"!! {checked.fault}")
                    self._outcome.check_faults.append(checked.fault)
            if self._outcome.num_inputs % 500 == 0:
                self._say(f"   {self._outcome.num_inputs} sent, {len(self._outcome.failures)} answered wrongly")
        self._in_flight.pop(index, None)

    def _begin(self, index: int, each: Input | None) -> None:
        self._in_flight[index] = each
        self._since_look.append(each)

    def _fail(self, failure: Failure) -> None:
        known = {each.group for each in self._outcome.failures}
        self._outcome.failures.append(failure)
        if failure.group not in known and len(known) < FAILURES_SHOWN:
            self._say(f"!! {failure.each.kind}: {failure.each.what[:120]!r}: {failure.fault[:300]}")
            self._save(failure, f"{len(known):03}")

    def _save(self, failure: Failure, name: str) -> None:
        self._failure_dir.mkdir(parents=True, exist_ok=True)
        path = self._failure_dir / f"{name}.json"
        path.write_text(json.dumps({"fault": failure.fault, "input": to_json(failure.each)}, indent=1) + "\n")
        self._say(f"   --replay {path}")

    async def _read_lag(self, system: SecuredSystem) -> Reading:
        return Reading.parse(await system.metrics(COORDINATOR))

    async def _look(self, system: SecuredSystem) -> None:
        before = await self._read_lag(system)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # What came to its end before this look has begun before it, or was in flight at the one before.
            self._since_look, begun = [*self._in_flight.values()], self._since_look
            try:
                now = await self._read_lag(system)
            except httpx.HTTPError as error:
                self._say(f"   the coordinator's metrics did not come: {type(error).__name__}: {error}")
                self._since_look = begun + self._since_look
                continue
            kinds = {CHECKS if each is None else each.kind for each in begun}
            if self._outcome.lag.take(before, now, kinds):
                self._suspects |= {id(each): each for each in begun if each is not None}
                worst_ms = now.own.worst_s(before.own) * 1e3
                self._say(f"   the loop was held up for up to {worst_ms:.0f} ms; {len(begun)} inputs were in flight:")
                for each in begun[:IN_FLIGHT_SHOWN]:
                    self._say(f"      {CHECKS if each is None else f'{each.kind}: {each.what[:140]!r}'}")
            before = now

    async def _send_alone(self, system: SecuredSystem, sender: Sender) -> None:
        """Sends the inputs that were in flight while the loop was late again, one after the other with nothing beside
        them."""
        suspects = list(self._suspects.values())
        if suspects:
            self._say(f"{len(suspects)} inputs were in flight while the loop was held up; each is sent alone.")
        for each in suspects[:SUSPECTS_MAX]:
            before = await self._read_lag(system)
            for _ in range(ALONE_TIMES):
                await sender.send(each)
                await asyncio.sleep(0.15)  # a tick sees it
            now = await self._read_lag(system)
            if now.own.num_late(before.own):
                worst_ms = now.own.worst_s(before.own) * 1e3
                failure = Failure(each, f"holds up the loop for up to {worst_ms:.0f} ms, more than {LAG_MAX_S * 1e3:g}")
                self._outcome.late_alone.append(failure)
                self._say(f"!! alone: {each.kind}: {each.what[:120]!r}: {failure.fault}")
                self._save(failure, f"late-{len(self._outcome.late_alone):03}")
