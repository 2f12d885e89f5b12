"""The experiment: learn what is right, keep asking while things break, compare, and look at what is left behind."""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from outrider.concurrency.background import end_tasks
from outrider.security.tls import Role
from tests.e2e.chaos import footprint, saturation
from tests.e2e.chaos.batches import EVERY_S, BatchClient, BatchTable, refused_for_room
from tests.e2e.chaos.cases import Case, make_cases
from tests.e2e.chaos.certificates import TENANTS
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.fleet import Fleet, FleetOptions
from tests.e2e.chaos.ledger import Injection, Ledger, in_words
from tests.e2e.chaos.load import Learner, Load
from tests.e2e.chaos.saturation import Saturation
from tests.e2e.chaos.stranger import Stranger
from tests.e2e.chaos.stranger_table import StrangerTable
from tests.e2e.chaos.verdict import Answer, Kind, Right, Verdict

RECOVERY_S_MAX = 180.0  # beside a fault that goes on bringing targets down, on a slow machine
IDLE_S_MAX = 30.0
NOTICE_S_MAX = 15.0  # of a lease that runs out
WARM_UP_S = 8.0
NUM_STRANGERS = 2
STREAMING_SHARE = 0.7  # of what strangers ask
CROWDED_S, CALM_S = 45.0, 15.0  # with all clients, and with a third of them
LAG_S_MAX = 1.0
PAUSE_S = (0.1, 1.0)  # between two faults: the moment is chosen by chance


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Faults, load and bounds of an experiment, which ends at the bound that is met first."""

    faults: Sequence[type[Fault]]
    seed: int
    num_faults_max: int
    seconds_max: float
    num_at_once: int = 1
    num_cases: int = 40
    fleet: FleetOptions = field(default_factory=FleetOptions)


@dataclass
class Outcome:
    """Results of an experiment."""

    ledger: Ledger
    surprises: list[str]
    leaks: list[str]
    footprints: list[str]
    saturation: Saturation
    strangers: StrangerTable
    batches: BatchTable
    seconds: float  # of the part with faults

    @property
    def is_clean(self) -> bool:
        failures = self.ledger.failures or self.batches.failures
        return not (failures or self.surprises or self.leaks or self.strangers.silent)

    def to_json(self) -> dict[str, Any]:
        return {
            "is_clean": self.is_clean,
            "seconds": round(self.seconds, 1),
            **self.ledger.to_json(),
            "processes_that_ended_by_themselves": self.surprises,
            "leaks": self.leaks,
            "footprints": self.footprints,
            "saturation": self.saturation.to_json(),
            "strangers": self.strangers.to_json(),
            "batches": self.batches.to_json(),
        }


class Experiment:
    """One run of one plan."""

    def __init__(self, plan: Plan, log_dir: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._log_dir = log_dir
        self._say = say
        self._ledger = Ledger()
        self._saturation = Saturation(plan.fleet.num_slots)
        self._strangers = StrangerTable()
        self._strangers_asked_s: dict[int, float] = {}  # requests under way
        self._batches = BatchTable()
        self._emptied_s = float("-inf")  # until when Redis may have lost its data
        self._is_ending = False
        self._num_begun = 0
        self._num_surprises_told = 0
        self._deadline_s = float("inf")

    def end_early(self) -> bool:
        """Ends the injection of faults. Returns False where it has not begun, or has ended."""
        now_s = time.monotonic()
        if not now_s < self._deadline_s < float("inf"):
            return False
        self._say("No more faults; the report follows.")
        self._deadline_s = now_s
        return True

    async def run(self) -> Outcome:
        """Raises NotReproducible, and StartError when a process does not come up."""
        plan = self._plan
        are_greedy = bool(plan.fleet.vllm_python)
        cases = make_cases(plan.num_cases, Random(f"{plan.seed} cases"), are_greedy=are_greedy)
        began_s = time.monotonic()
        async with Fleet(plan.fleet, self._log_dir, self._say) as fleet:
            self._say(f"Everything is up after {time.monotonic() - began_s:.0f} s; logs are in {self._log_dir}.")
            known = await self._learn(fleet, cases)
            for kind in plan.faults:
                await kind.prepare(fleet, cases)
            warm_up = Load(fleet.client, cases, known, Random(f"{plan.seed} warm-up"), self._take_quiet)
            async with warm_up.asking(plan.fleet.num_clients):
                await asyncio.sleep(WARM_UP_S)
            problem = await footprint.until_idle(fleet, IDLE_S_MAX)
            before = await footprint.measure(fleet)
            self._say(f"{self._ledger.num_answers} answers without any fault. Now with faults, seed {plan.seed}:")
            seconds = await self._break_things(fleet, cases, known)
            leaks = [f"before any fault: {problem}"] if problem else []
            leaks += await self._left_behind(fleet, before)
            leaks += await self._unwatched(fleet)
            footprints = footprint.table(before, await footprint.measure(fleet))
        return Outcome(
            self._ledger,
            fleet.surprises,
            leaks,
            footprints,
            self._saturation,
            self._strangers,
            self._batches,
            seconds,
        )

    async def _learn(self, fleet: Fleet, cases: Sequence[Case]) -> dict[str, tuple[Right, ...]]:
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    fleet.certificates.channel(worker.link.address, "coordinator", Role.TARGET)
                )
                for worker in fleet.of_role("target")
            ]
            known = await Learner(fleet.client, channels).learn(cases)
        num_tokens = sum(len(right.token_ids) for rights in known.values() for right in rights)
        self._say(f"Learned {len(known)} right answers of {num_tokens} tokens, each twice.")
        return known

    async def _break_things(self, fleet: Fleet, cases: Sequence[Case], known: dict[str, tuple[Right, ...]]) -> float:
        plan = self._plan
        load = Load(fleet.client, cases, known, Random(f"{plan.seed} load"), lambda *told: self._take(load, *told))
        began_s = time.monotonic()
        self._deadline_s = began_s + plan.seconds_max
        watches = [
            asyncio.create_task(self._watch_ourselves()),
            asyncio.create_task(saturation.watch(self._saturation, fleet.target_pages)),
            asyncio.create_task(self._vary(load)),
        ]
        others = [
            asyncio.create_task(self._be_a_stranger(fleet, cases, Random(f"{plan.seed} stranger {number}")))
            for number in range(NUM_STRANGERS)
        ]
        others.append(asyncio.create_task(self._run_batches(fleet, load, Random(f"{plan.seed} batches"))))
        try:
            async with load.asking(plan.fleet.num_clients), asyncio.TaskGroup() as lanes:
                for lane in range(plan.num_at_once):
                    rng = Random(f"{plan.seed} faults {lane}")
                    lanes.create_task(self._inject_all(fleet, load, rng, began_s))
        finally:
            self._is_ending = True
            await asyncio.gather(*others)  # each has a bound of its own
            await end_tasks(*watches)
        return time.monotonic() - began_s

    async def _inject_all(self, fleet: Fleet, load: Load, rng: Random, began_s: float) -> None:
        # Each kind once before any comes again.
        bag: list[type[Fault]] = []
        while self._num_begun < self._plan.num_faults_max and time.monotonic() < self._deadline_s:
            if not bag:
                bag = rng.sample(self._plan.faults, len(self._plan.faults))
            kind = bag.pop()
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            self._num_begun += 1
            takes_room = kind.part in ("target", "targets", "coordinator")
            injection = Injection(self._num_begun, kind.name, 0.0, kind.costs, takes_room)
            fault = kind(fleet, load, rng, injection)
            async with fault.victim() as worker:
                injection.began_s = time.monotonic()
                self._ledger.begin(injection)
                if kind.empties_redis:
                    self._emptied_s = float("inf")
                try:
                    await fault.run(worker)
                except Exception as error:  # what hours have shown is worth more than a clean end
                    fleet.surprises.append(f"{kind.name} itself failed: {type(error).__name__}: {error}")
                    self._say("!! " + traceback.format_exc())
                self._ledger.mended(injection, time.monotonic())
                problem = await fleet.until_whole(RECOVERY_S_MAX, fault.part if worker is None else worker.name)
                self._ledger.end(injection, time.monotonic(), problem)
                if kind.empties_redis:
                    self._emptied_s = time.monotonic()
            self._tell(injection, began_s)
            for surprise in fleet.surprises[self._num_surprises_told :]:
                self._say(f"!! {surprise}")
            self._num_surprises_told = len(fleet.surprises)

    async def _vary(self, load: Load) -> None:
        """More clients than places for most of the time, fewer in between: what is full shows other things than what
        is not."""
        num_clients = self._plan.fleet.num_clients
        while True:
            for num_asking, seconds in ((num_clients, CROWDED_S), (max(1, num_clients // 3), CALM_S)):
                load.ask_with(num_asking)
                await asyncio.sleep(seconds)

    async def _be_a_stranger(self, fleet: Fleet, cases: Sequence[Case], rng: Random) -> None:
        """Asks as somebody who knows nothing of us, one request after the other."""
        async with Stranger(fleet.balancer.url, fleet.keys["stranger"], fleet.certificates.context(None)) as stranger:
            while not self._is_ending:
                number = id(stranger)
                self._strangers_asked_s[number] = time.monotonic()
                max_tokens, is_streaming = rng.choice((16, 60, 150)), rng.random() < STREAMING_SHARE
                seen = await stranger.ask(rng.choice(cases).prompt, max_tokens, is_streaming)
                del self._strangers_asked_s[number]
                self._strangers.add(self._ledger.name_of_fault(seen.asked_s, seen.ended_s), seen)
                await asyncio.sleep(rng.uniform(0.0, 0.5))

    async def _run_batches(self, fleet: Fleet, load: Load, rng: Random) -> None:
        """One batch after the other."""
        key, trust = fleet.keys[TENANTS[0]], fleet.certificates.context(None)
        async with BatchClient(fleet.balancer.url, key, trust, load.judge, lambda: self._emptied_s) as client:
            self._batches = client.table
            while not self._is_ending:
                num_failures = len(client.table.failures)
                await client.run(load.cases, rng)
                for failure in client.table.failures[num_failures:]:
                    self._say(f"!! batch: {failure}")
                await asyncio.sleep(EVERY_S)

    async def _watch_ourselves(self) -> None:
        """The relays and the clients run here: when this process does not, everybody else seems to hang."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LAG_S_MAX / 2)
            if (lag_s := time.monotonic() - before_s - LAG_S_MAX / 2) > LAG_S_MAX:
                self._say(f"   (this process did not run for {lag_s:.1f} s)")

    def _tell(self, injection: Injection, began_s: float) -> None:
        now_s = injection.recovered_s
        total = self._ledger.total()
        counts = [total.num_tokens[kind] for kind in (Kind.LOST, Kind.REPEATED, Kind.WRONG)]
        what = f"{injection.name} ({injection.detail})" if injection.detail else injection.name
        self._say(
            f"{now_s - began_s:6.0f} s  {injection.number:4} {what:<62} well after "
            f"{in_words(now_s - injection.began_s):>7} · {self._ledger.num_answers} answers · lost, repeated, wrong, "
            f"refused {', '.join(map(str, [*counts, total.num_refused]))}"
        )
        if injection.problem is not None:
            self._say(f"!! {injection.problem}")

    def _take_quiet(self, case: Case, answer: Answer, verdict: Verdict) -> None:
        self._take_one(case, answer, verdict, answer.ended_s)

    def _take(self, load: Load, case: Case, answer: Answer, verdict: Verdict) -> None:
        oldest_s = min((load.oldest_open_s, answer.asked_s, *self._strangers_asked_s.values()))
        self._take_one(case, answer, verdict, oldest_s)

    def _take_one(self, case: Case, answer: Answer, verdict: Verdict, oldest_open_s: float) -> None:
        for words in refused_for_room(answer):
            self._batches.failures.append(f"a request beside batches is refused: {words}")
            self._say(f"!! {self._batches.failures[-1]}")
        num_failures = len(self._ledger.failures)
        self._ledger.add(case.name, answer, verdict, oldest_open_s)
        for failure in self._ledger.failures[num_failures:]:
            self._say(f"!! {failure}")

    async def _left_behind(self, fleet: Fleet, before: footprint.Footprint) -> list[str]:
        """Descriptions of everything that has not recovered or been given back within its time."""
        problem = await fleet.until_whole(RECOVERY_S_MAX)
        if problem is not None:
            return [f"not whole after the last fault: {problem}"]
        deadline_s = time.monotonic() + IDLE_S_MAX
        while True:
            busy = await footprint.until_idle(fleet, max(0.0, deadline_s - time.monotonic()))
            found = [*([busy] if busy else []), *footprint.leaks(before, await footprint.measure(fleet))]
            if not found or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.5)

    async def _unwatched(self, fleet: Fleet) -> list[str]:
        """Describes a coordinator that does not notice that a worker is gone, and so would serve an outdated view for
        long."""
        fleet.send(worker := fleet.of_role("draft")[0], signal.SIGSTOP)
        try:
            deadline_s = time.monotonic() + NOTICE_S_MAX
            for index in range(len(fleet.coordinators)):
                while (await fleet.health(index)).get("num_draft_workers") != len(fleet.of_role("draft")) - 1:
                    if time.monotonic() > deadline_s:
                        return [
                            f"coordinator-{index} has not noticed within {NOTICE_S_MAX:g} s that {worker.name} is gone"
                        ]
                    await asyncio.sleep(0.1)
        finally:
            fleet.send(worker, signal.SIGCONT)
        problem = await fleet.until_whole(RECOVERY_S_MAX)
        return [] if problem is None else [f"not whole after everything: {problem}"]
