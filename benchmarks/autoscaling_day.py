"""Do the two pools scale apart? `python -m benchmarks.autoscaling_day --help`.

A day of traffic is replayed against a model of the fleet: requests that arrive at random, targets that serve so many at
once, draft workers that make those they follow faster, starts that take minutes. Every 15 s of that day the queries of
`k8s/components/keda` are answered and the autoscalers of these ScaledObjects decide, by Kubernetes' formula
(`benchmarks.horizontal_autoscaler`).

Two kinds of traffic take turns. People, most of them in the afternoon, whose texts are guessed well; and batches, at
night, whose texts are not, so that they are in fallback and have no draft worker. So the night needs targets and no
drafts, and the day both.

With `--prometheus` what the fleet would have exported in that day is given to a real Prometheus, which is asked the
ScaledObjects' very queries for each of the day's moments; the decisions that follow from its answers are compared with
those of the replay. Nothing here measures speed: it is about which pool has how many replicas when.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from benchmarks.horizontal_autoscaler import SYNC_S, Autoscaler
from outrider.cli.bench.plot import COLORS, document, text_at
from outrider.free_ports import free_ports

SCALED_OBJECTS: Final = Path(__file__).resolve().parents[1] / "k8s/components/keda/scaledobjects.yaml"
DAY_S: Final = 86_400
LEAD_S: Final = 3600.0
PLACES: Final = 32  # sessions of a worker, of either kind
STARTS_IN_S: Final = {"target": 240.0, "draft": 60.0}
TOKENS_A_SECOND: Final = 20.0  # of one text, plainly
SPEEDUP: Final = 1.8  # with a draft worker
BATCH_SIZE_COST: Final = 0.01  # by which a step is slower for each other text in it
KV_SHARE: Final = 0.022  # of a target's KV that a text takes


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic. Arrivals by the hour, requests a second; between two hours in a straight line."""

    name: str
    arrivals: tuple[float, ...]  # 25: at 0, 1, ... 24 o'clock
    mean_tokens: float
    chance_to_pay: float  # that speculation pays; the others are in fallback

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
    """Replicas of one kind: those that serve, and when those to come will."""

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
    """What was the case, and what it led to."""

    at_s: float
    num_running: int
    num_waiting: int
    num_paying: int  # of all, those that speculate or would
    num_drafted: int
    kv_usage: float  # summed over targets
    targets: int  # that serve
    drafts: int
    wanted_targets: int  # from now on
    wanted_drafts: int


class Fleet:
    """Targets, drafts and the texts in them, a few seconds at a time."""

    STEP_S: Final = 5.0

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.targets = Pool("target", 1, 1)
        self.drafts = Pool("draft", 0, 0)
        self.running: list[Text] = []
        self.waiting: list[Text] = []
        self.num_served = 0  # since midnight

    def advance(self, now_s: float) -> None:
        """One step: arrivals, admissions, tokens."""
        self.targets.start(now_s)
        self.drafts.start(now_s)
        for kind in (PEOPLE, BATCHES):
            for _ in range(_poisson(self._chance, kind.rate(now_s % DAY_S) * self.STEP_S)):
                num_tokens = self._chance.expovariate(1 / kind.mean_tokens) + 1
                self.waiting.append(Text(self._chance.random() < kind.chance_to_pay, num_tokens))
        room = self.targets.num_ready * PLACES - len(self.running)
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
        """Texts that a draft worker follows."""
        return min(sum(text.pays for text in self.running), self.drafts.num_ready * PLACES)

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
    """Knuth's way, which is for small means."""
    limit, product, count = math.exp(-mean), chance.random(), 0
    while product > limit:
        product *= chance.random()
        count += 1
    return count


def autoscalers(path: Path = SCALED_OBJECTS) -> dict[str, Autoscaler]:
    """Those of the manifests, by the pool they scale."""
    documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return {each.name: each for each in map(Autoscaler.parse, documents)}


def totals_of(moment: Moment) -> dict[str, list[float]]:
    """What the ScaledObjects' queries come to, by pool; `check_with_prometheus` asks whether that is so."""
    num_texts = moment.num_running + moment.num_waiting
    return {"draft": [float(moment.num_paying)], "target": [float(num_texts), moment.kv_usage]}


def replay(seed: int) -> tuple[list[Moment], Fleet]:
    """A moment for each decision. It begins an hour before midnight, so that midnight finds a fleet."""
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
                replace(
                    before, wanted_targets=fleet.targets.num_wanted, wanted_drafts=fleet.drafts.num_wanted
                )
            )
    return moments, fleet


def num_reversals(wanted: Sequence[int]) -> int:
    """How often a pool went the other way: one that breathes once in a day reverses once or twice."""
    steps = [after - before for before, after in itertools.pairwise(wanted) if after != before]
    return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(steps))


# What a real Prometheus makes of it.


def exposition(moments: Sequence[Moment], base_s: int) -> Iterator[str]:
    """What the fleet's processes would have exported, in OpenMetrics' text format with timestamps."""
    families: dict[str, list[str]] = {}

    def put(name: str, labels: str, moment: Moment, value: float) -> None:
        at_s = base_s + LEAD_S + moment.at_s
        families.setdefault(name, []).append(f"outrider_{name}{{{labels}}} {value:.6g} {at_s:.3f}")

    for moment in moments:
        for index in range(moment.targets):
            labels = f'job="outrider-target",model_name="large",engine="target-{index}"'
            own = moment.num_running // moment.targets + (index < moment.num_running % moment.targets)
            put("num_requests_running", labels, moment, own)
            put("num_requests_waiting", labels, moment, 0)
            put("kv_cache_usage_perc", labels, moment, own * KV_SHARE)
        # Two coordinators share what waits and what speculates.
        for index in range(2):
            labels = (
                f'job="outrider-coordinator",model_name="large",engine="coordinator",instance="c-{index}"'
            )

            def half(value: int, index: int = index) -> int:
                return value // 2 + (value % 2 if index else 0)

            put("num_requests_queued", labels, moment, half(moment.num_waiting))
            num_drafted = min(moment.num_drafted, moment.num_paying)
            counts = {
                "speculating": num_drafted,
                "undrafted": moment.num_paying - num_drafted,
                "paused": moment.num_running + moment.num_waiting - moment.num_paying,
            }
            for state, count in counts.items():
                put("fallback_requests", f'{labels},state="{state}"', moment, half(count))
    for name, lines in families.items():
        yield f"# TYPE outrider_{name} gauge"
        yield from lines
    yield "# EOF"


def check_with_prometheus(moments: Sequence[Moment], prometheus: str, promtool: str) -> int:
    """Asks a real Prometheus the ScaledObjects' queries; returns the number of moments at which its answers lead to
    other decisions. Raises RuntimeError when it does not run."""
    base_s = int(time.time()) // 3600 * 3600 - 2 * DAY_S
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "day.txt")
        text.write_text("\n".join(exposition(moments, base_s)) + "\n", encoding="utf-8")
        made = subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", str(text), f"{folder}/data"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"promtool: {made.stderr[-500:]}")
        (port,) = free_ports(1)
        Path(folder, "prometheus.yml").write_text("scrape_configs: []\n", encoding="utf-8")
        words = [
            prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            # A scrape marks what is gone as gone; a file cannot.
            f"--query.lookback-delta={SYNC_S - 1:g}s",
        ]  # fmt: skip
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return _num_differences(moments, base_s, f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait(30)


def _num_differences(moments: Sequence[Moment], base_s: int, url: str) -> int:
    scalers = autoscalers()
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        _wait_until_ready(client)
        answers = {
            pool: [_asked(client, trigger.query, moments, base_s) for trigger in scaler.triggers]
            for pool, scaler in scalers.items()
        }
    replicas = {"target": 1, "draft": 0}
    num_different = 0
    for index, moment in enumerate(moments):
        for pool, scaler in scalers.items():
            totals = [series[index] for series in answers[pool]]
            replicas[pool] = scaler.decide(moment.at_s, replicas[pool], totals)
        num_different += (replicas["target"], replicas["draft"]) != (
            moment.wanted_targets,
            moment.wanted_drafts,
        )
    return num_different


def _asked(client: httpx.Client, query: str, moments: Sequence[Moment], base_s: int) -> list[float]:
    """The query's value at each moment."""
    start = base_s + LEAD_S + moments[0].at_s
    values: list[float] = []
    for first in range(0, len(moments), 10_000):  # as many points as Prometheus answers at once, nearly
        part = moments[first : first + 10_000]
        asked: dict[str, str | float] = {
            "query": query,
            "start": start + first * SYNC_S,
            "end": start + (first + len(part) - 1) * SYNC_S,
            "step": SYNC_S,
        }
        answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
        (series,) = answer["data"]["result"]
        values += [float(value) for _, value in series["values"]]
    assert len(values) == len(moments), f"{query}: {len(values)} answers for {len(moments)} moments"
    return values


def _wait_until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError("Prometheus did not become ready within a minute")
        time.sleep(0.1)


# The picture.

_WIDTH, _PANEL, _LEFT, _TOP = 760, 150, 60, 40


def draw(moments: Sequence[Moment]) -> str:
    """Texts of both kinds above, replicas of each pool below, by the hour."""
    day = [moment for moment in moments if moment.at_s >= 0]
    panels: list[tuple[str, list[tuple[str, list[float]]]]] = [
        (
            "texts at once",
            [
                ("that speculate, or would", [moment.num_paying for moment in day]),
                (
                    "in fallback",
                    [moment.num_running + moment.num_waiting - moment.num_paying for moment in day],
                ),
            ],
        ),
        (
            "replicas wanted",
            [
                ("draft workers", [moment.wanted_drafts for moment in day]),
                ("target workers", [moment.wanted_targets for moment in day]),
            ],
        ),
    ]
    parts = [text_at(_WIDTH / 2, 22, "One day, two pools", size=15, weight="bold")]
    for number, (title, lines) in enumerate(panels):
        top = _TOP + number * (_PANEL + 60)
        most = max(max(values) for _, values in lines) or 1
        parts.append(text_at(_LEFT, top - 6, title, anchor="start", color="#666"))
        for share in (0.0, 0.5, 1.0):
            y = top + _PANEL * (1 - share)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(text_at(_LEFT - 6, y + 4, f"{most * share:g}", anchor="end"))
        for hour in range(0, 25, 3):
            x = _LEFT + (_WIDTH - 20 - _LEFT) * hour / 24
            parts.append(text_at(x, top + _PANEL + 16, f"{hour}:00"))
        for color, (name, values) in enumerate(lines):
            every = 4  # a point a minute
            points = " ".join(
                f"{_LEFT + (_WIDTH - 20 - _LEFT) * i / len(values):.1f},{top + _PANEL * (1 - values[i] / most):.1f}"
                for i in range(0, len(values), every)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLORS[color]}" stroke-width="1.6"/>'
            )
            parts.append(text_at(_WIDTH - 24, top + 12 + 16 * color, name, anchor="end", color=COLORS[color]))
    return document(_WIDTH, _TOP + len(panels) * (_PANEL + 60), parts)


def summary(moments: Sequence[Moment], fleet: Fleet) -> dict[str, Any]:
    """What the README states."""
    day = [moment for moment in moments if moment.at_s >= 0]

    def by_hour(hours: range, name: str) -> float:
        chosen = [getattr(each, name) for each in day if int(each.at_s // 3600) in hours]
        return round(sum(chosen) / len(chosen), 1)

    return {
        "requests": fleet.num_served,
        "night": {name: by_hour(range(1, 4), name) for name in ("wanted_targets", "wanted_drafts")},
        "afternoon": {name: by_hour(range(13, 16), name) for name in ("wanted_targets", "wanted_drafts")},
        "quiet morning": {name: by_hour(range(7, 8), name) for name in ("wanted_targets", "wanted_drafts")},
        "reversals": {
            "target": num_reversals([each.wanted_targets for each in day]),
            "draft": num_reversals([each.wanted_drafts for each in day]),
        },
        "share of moments with texts waiting": round(sum(each.num_waiting > 0 for each in day) / len(day), 4),
        "speculating texts without a draft": round(
            1 - sum(each.num_drafted for each in day) / max(sum(each.num_paying for each in day), 1), 4
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling_day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the day as SVG")
    parser.add_argument(
        "--prometheus", action="store_true", help="ask a real Prometheus, which is in the PATH"
    )
    given = parser.parse_args(arguments)
    moments, fleet = replay(given.seed)
    print(json.dumps(summary(moments, fleet), indent=2))
    if given.plot is not None:
        given.plot.write_text(draw(moments), encoding="utf-8")
    if given.prometheus:
        programs = shutil.which("prometheus"), shutil.which("promtool")
        if programs[0] is None or programs[1] is None:
            print(
                "prometheus and promtool are not in the PATH (Debian: apt-get install prometheus)",
                file=sys.stderr,
            )
            return 2
        num_different = check_with_prometheus(moments, programs[0], programs[1])
        print(f"decisions from Prometheus' answers: {num_different} of {len(moments)} differ")
        return 1 if num_different else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
