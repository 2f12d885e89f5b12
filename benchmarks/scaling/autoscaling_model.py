"""Model of a fleet over a day of traffic, scaled by the chart's autoscalers. Pure but for reading the chart."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

from benchmarks.scaling.horizontal_autoscaler import SYNC_S, Autoscaler
from k8s.helm.chart import preset, render

PRESET: Final = "llama-70b"
DAY_S: Final = 86_400
LEAD_S: Final = 3600.0
SLOTS: Final = 32  # sessions of a worker, of either kind
STARTS_IN_S: Final = {"target": 240.0, "draft": 60.0}
TOKENS_A_SECOND: Final = 20.0  # of one request, plain decoding
SPEEDUP: Final = 1.8  # with a draft worker
BATCH_SIZE_COST: Final = 0.01  # slowdown of a step for each other request in it
KV_SHARE: Final = 0.022  # of a target's KV that a request takes


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic. Arrivals are requests per second by hour, interpolated linearly."""

    name: str
    arrivals: tuple[float, ...]  # 25: at 0, 1, ... 24 o'clock
    mean_tokens: float
    chance_to_pay: float  # probability that speculation pays; other requests are in fallback

    def rate(self, now_s: float) -> float:
        hour = now_s / 3600
        before = min(int(hour), 23)
        return self.arrivals[before] + (self.arrivals[before + 1] - self.arrivals[before]) * (hour - before)


PEOPLE: Final = Kind(
    "people",
    tuple(0.2 + 11.0 * math.exp(-(((hour - 14.5) / 3.6) ** 2)) for hour in range(25)),
    mean_tokens=300,
    chance_to_pay=0.92,
)
BATCHES: Final = Kind(
    "batches",
    (*(4.4,) * 5, 1.6, *(0.1,) * 17, 2.2, 4.4),
    mean_tokens=500,
    chance_to_pay=0.04,
)


@dataclass(slots=True)
class Text:
    """One request at a target."""

    pays: bool
    num_left: float  # tokens


@dataclass(slots=True)
class Pool:
    """Replicas of one kind: those that serve, and the start times of others."""

    kind: str
    num_ready: int
    num_wanted: int
    starting: list[float] = field(default_factory=list)

    def scale(self, replicas: int, now_s: float) -> None:
        while replicas > self.num_ready + len(self.starting):
            self.starting.append(now_s + STARTS_IN_S[self.kind])
        while replicas < self.num_ready + len(self.starting) and self.starting:
            self.starting.pop()
        self.num_ready = min(self.num_ready, replicas)
        self.num_wanted = replicas

    def start(self, now_s: float) -> None:
        due = [at_s for at_s in self.starting if at_s <= now_s]
        self.starting = [at_s for at_s in self.starting if at_s > now_s]
        self.num_ready += len(due)


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the fleet at one time, and the decisions that followed."""

    at_s: float
    num_running: int
    num_waiting: int
    num_paying: int  # of all requests: speculating, or would with a draft
    num_drafted: int
    kv_usage: float  # summed over targets
    targets: int  # serving
    drafts: int
    wanted_targets: int  # decided now
    wanted_drafts: int


class Fleet:
    """Targets, drafts and their requests, simulated in steps of STEP_S seconds."""

    STEP_S: Final = 5.0

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.targets = Pool("target", 1, 1)
        self.drafts = Pool("draft", 0, 0)
        self.running: list[Text] = []
        self.waiting: list[Text] = []
        self.num_served = 0  # since midnight

    def advance(self, now_s: float) -> None:
        """Simulates one step: arrivals, admissions, tokens."""
        self.targets.start(now_s)
        self.drafts.start(now_s)
        for kind in (PEOPLE, BATCHES):
            for _ in range(_poisson(self._chance, kind.rate(now_s % DAY_S) * self.STEP_S)):
                num_tokens = self._chance.expovariate(1 / kind.mean_tokens) + 1
                self.waiting.append(Text(self._chance.random() < kind.chance_to_pay, num_tokens))
        room = self.targets.num_ready * SLOTS - len(self.running)
        self.running += self.waiting[: max(room, 0)]
        del self.waiting[: max(room, 0)]
        num_drafts = self.num_drafted
        batch = len(self.running) / max(self.targets.num_ready, 1)
        plain = TOKENS_A_SECOND / (1 + BATCH_SIZE_COST * batch) * self.STEP_S
        for text in self.running:
            is_drafted = text.pays and num_drafts > 0
            num_drafts -= is_drafted
            text.num_left -= plain * (SPEEDUP if is_drafted else 1.0)
        before = len(self.running)
        self.running = [text for text in self.running if text.num_left > 0]
        if now_s >= 0:
            self.num_served += before - len(self.running)

    @property
    def num_drafted(self) -> int:
        """Requests with a draft worker."""
        return min(sum(text.pays for text in self.running), self.drafts.num_ready * SLOTS)

    def moment(self, now_s: float) -> Moment:
        return Moment(
            at_s=now_s,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_paying=sum(text.pays for text in (*self.running, *self.waiting)),
            num_drafted=self.num_drafted,
            kv_usage=round(KV_SHARE * len(self.running), 6),
            targets=self.targets.num_ready,
            drafts=self.drafts.num_ready,
            wanted_targets=self.targets.num_wanted,
            wanted_drafts=self.drafts.num_wanted,
        )


def _poisson(chance: random.Random, mean: float) -> int:
    """A Poisson variate by Knuth's method, which is for small means."""
    limit, product, count = math.exp(-mean), chance.random(), 0
    while product > limit:
        product *= chance.random()
        count += 1
    return count


@cache
def _scaled_objects(served_model_name: str | None) -> list[dict[str, Any]]:
    values = preset(PRESET)
    if served_model_name is not None:
        values["pairs"][0]["servedModelName"] = served_model_name
    return [each for each in render(values) if each["kind"] == "ScaledObject"]


def autoscalers(served_model_name: str | None = None) -> dict[str, Autoscaler]:
    """Autoscalers of the preset for a 70B model, by the pool they scale. The name is by default the preset's."""
    objects = _scaled_objects(served_model_name)
    return {each.name.rpartition("-")[2]: each for each in map(Autoscaler.parse, objects)}


def totals_of(moment: Moment) -> dict[str, list[float]]:
    """Results of the ScaledObjects' queries, by pool; `check_with_prometheus` verifies them."""
    num_sequences = moment.num_running + moment.num_waiting
    return {"draft": [float(moment.num_paying)], "target": [float(num_sequences), moment.kv_usage]}


def replay(seed: int) -> tuple[list[Moment], Fleet]:
    """Simulates the day; one moment per decision. It begins an hour before midnight, so that a fleet exists by then."""
    fleet, scalers = Fleet(random.Random(seed)), autoscalers()
    moments: list[Moment] = []
    for step in range(round((LEAD_S + DAY_S) / Fleet.STEP_S)):
        now_s = step * Fleet.STEP_S - LEAD_S
        fleet.advance(now_s)
        if step % round(SYNC_S / Fleet.STEP_S) == 0:
            before = fleet.moment(now_s)
            totals = totals_of(before)
            for pool in (fleet.targets, fleet.drafts):
                pool.scale(scalers[pool.kind].decide(now_s, pool.num_wanted, totals[pool.kind]), now_s)
            moments.append(
                replace(before, wanted_targets=fleet.targets.num_wanted, wanted_drafts=fleet.drafts.num_wanted)
            )
    return moments, fleet


def num_reversals(wanted: Sequence[int]) -> int:
    """Number of changes of direction of a pool: a pool with one daily cycle reverses once or twice."""
    steps = [after - before for before, after in itertools.pairwise(wanted) if after != before]
    return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(steps))
