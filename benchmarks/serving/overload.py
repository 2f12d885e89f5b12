"""Measures ten times more requests than can be served.

One system is up (`outrider serve`) and gets four loads in turn: one request at a time; as many at once as the target
has slots, its peak; an open loop at `--factor` times that rate for `--seconds`; and the peak again, to show drift of
the machine. Requests are streamed, greedy and equally long.

The result shows goodput (tokens of complete answers per second) relative to the peak; the answers to all other
requests (429 with Retry-After, or something worse); the times of admitted requests from the first token on and in
total; and the memory of every process. The exit status is 1 if goodput falls below `--goodput-min`, if a request got
no answer, if the 99th percentile after the first token is above `--slower-max` times the peak's, if that of the total
is above this plus the longest wait, or if memory still grows in the last 33 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import psutil

from benchmarks.serving.http_servers import HttpServer, running_outrider
from benchmarks.shared.figures import percentile
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from command_line.load.requests import new_bench_client
from demo.corpus import held_out_prompts

TIMEOUT_S: Final = 120.0
SETTLING_SHARE: Final = 0.15  # of an overload: the queue fills and nothing is counted
MEMORY_GROWTH_MAX: Final = 0.05  # of a process, between the second and the last 33 %
MEMORY_NOISE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; times in seconds on one clock."""

    sent_s: float
    ended_s: float
    first_s: float | None  # of the first token
    num_tokens: int
    outcome: str  # "ok", "429" or the failure
    retry_after_s: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(slots=True)
class Load:
    """One load and its results."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    memory: list[dict[str, int]] = field(default_factory=list)  # by process, about once a second

    def __str__(self) -> str:
        outcomes = Counter(each.outcome for each in self.answers)
        counts = ", ".join(f"{num} {name}" for name, num in outcomes.items())
        return f"{self.name}: {self.goodput:.0f} tokens/s; {counts}; {self.percentiles()}"

    @property
    def counted(self) -> list[Answer]:
        """Complete answers that ended within the time measured."""
        return [each for each in self.answers if each.is_ok and self.began_s <= each.ended_s <= self.ended_s]

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    @property
    def goodput(self) -> float:
        """Tokens of complete answers per second."""
        return sum(each.num_tokens for each in self.counted) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.counted) / self.seconds

    def percentiles(self) -> dict[str, float]:
        """Milliseconds to the first token, from there to the end, and in total."""
        found = {}
        for name, values in (
            ("ttft", [each.first_s - each.sent_s for each in self.counted if each.first_s]),
            ("rest", [each.ended_s - each.first_s for each in self.counted if each.first_s]),
            ("e2el", [each.ended_s - each.sent_s for each in self.counted]),
        ):
            for percent in (50, 99):
                found[f"{name}_p{percent}_ms"] = round(1e3 * percentile(values, percent / 100), 1)
        return found


class Client:
    """Client of streamed completions."""

    def __init__(self, url: str, prompts: Sequence[str], num_tokens: int, seed: int) -> None:
        self._url = f"{url}/v1/completions"
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._chance = random.Random(seed)
        self._http = new_bench_client(TIMEOUT_S, api_key=None)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self) -> Answer:
        """Sends one request. Never raises."""
        body = {
            "prompt": self._chance.choice(self._prompts),
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        sent_s, first_s = time.perf_counter(), None
        outcome, retry_after_s = "cut off", None
        try:
            async with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    outcome = str(response.status_code)
                    if response.headers.get("retry-after", "").isdigit():
                        retry_after_s = int(response.headers["retry-after"])
                else:
                    async for line in response.aiter_lines():
                        if line == "data: [DONE]":
                            outcome = "ok"
                        elif line.startswith("data: "):
                            if line.startswith('data: {"error"'):
                                outcome = line[:200]
                                break
                            first_s = first_s or time.perf_counter()
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        return Answer(sent_s, time.perf_counter(), first_s, self._num_tokens if outcome == "ok" else 0,
                      outcome, retry_after_s)  # fmt: skip


async def closed(client: Client, name: str, concurrency: int, seconds: float) -> Load:
    """Runs a closed loop of `concurrency` streams without pauses."""
    load = Load(name)
    load.began_s = time.perf_counter()
    load.ended_s = load.began_s + seconds

    async def one() -> None:
        while time.perf_counter() < load.ended_s:
            load.answers.append(await client.ask())

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return load


async def opened(client: Client, name: str, rate: float, seconds: float, seed: int, pid: int) -> Load:
    """Runs an open loop: Poisson arrivals at `rate` per second."""
    load, chance = Load(name), random.Random(seed)
    asked: set[asyncio.Task[Answer]] = set()
    start_s = time.perf_counter()
    load.began_s, load.ended_s = start_s + SETTLING_SHARE * seconds, start_s + seconds
    watch = asyncio.create_task(watch_memory(pid, load.memory))
    due_s = start_s
    try:
        while due_s < load.ended_s:
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            task = asyncio.create_task(client.ask())
            asked.add(task)
            due_s += chance.expovariate(rate)
        load.answers = list(await asyncio.gather(*asked))
    finally:
        watch.cancel()
    return load


async def watch_memory(pid: int, into: list[dict[str, int]]) -> None:
    while True:
        found = {}
        for process in psutil.Process(pid).children(recursive=True):
            try:
                found[f"{process.name()} {process.pid}"] = process.memory_info().rss
            except psutil.Error:
                continue
        into.append(found)
        await asyncio.sleep(1.0)


def still_growing(samples: Sequence[dict[str, int]]) -> list[str]:
    """Processes with more memory in the last 33 % of the time than in the 33 % before."""
    third = len(samples) // 3
    found = []
    for name in set.intersection(*map(set, samples)) if third else ():
        before, after = (
            statistics.median(each[name] for each in samples[start : start + third]) for start in (third, 2 * third)
        )
        if after > before * (1 + MEMORY_GROWTH_MAX) + MEMORY_NOISE_BYTES:
            found.append(f"{name} went from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
    return found


def judge(peak: Load, over: Load, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures of the overload relative to the peak, and all violations."""
    outcomes = Counter(each.outcome for each in over.answers)
    unanswered = {name: num for name, num in outcomes.items() if name not in ("ok", "429")}
    silent = sum(each.outcome == "429" and not each.retry_after_s for each in over.answers)
    ours, theirs = over.percentiles(), peak.percentiles()
    slower = ours["rest_p99_ms"] / theirs["rest_p99_ms"]
    whole = ours["e2el_p99_ms"] / (theirs["e2el_p99_ms"] + 1e3 * arguments.queue_wait_s)
    growing = still_growing(over.memory)
    figures = {
        "goodput_ratio": round(over.goodput / peak.goodput, 3),
        "outcomes": dict(outcomes),
        "retry_after_s": sorted({each.retry_after_s for each in over.answers if each.retry_after_s}),
        "refusal_p99_ms": round(1e3 * percentile(
            [each.ended_s - each.sent_s for each in over.answers if each.outcome == "429"], 0.99), 1),
        "rest_p99_ratio": round(slower, 3),
        "e2el_p99_over_peak_and_queue": round(whole, 3),
        "memory_growing": growing,
    }  # fmt: skip
    wrong = []
    if over.goodput < arguments.goodput_min * peak.goodput:
        wrong.append(f"goodput is {over.goodput / peak.goodput:.2f} of the peak's")
    if unanswered or silent:
        wrong.append(f"without a proper answer: {unanswered}, and {silent} refusals without Retry-After")
    if slower > arguments.slower_max:
        wrong.append(f"p99 from the first token on is {slower:.2f} times that of the peak")
    if whole > arguments.slower_max:
        wrong.append(f"p99 in all is {whole:.2f} times that of the peak and the longest wait together")
    return figures, wrong + growing


async def measure(arguments: argparse.Namespace, server: HttpServer, url: str) -> tuple[dict[str, Any], list[str]]:
    prompts = held_out_prompts(64, seed=arguments.seed)
    client = Client(url, prompts, arguments.tokens, arguments.seed)
    try:
        await closed(client, "warm-up", arguments.places, 3.0)
        alone = await closed(client, "one at a time", 1, arguments.peak_s / 2)
        peaks = [await closed(client, "peak", arguments.places + arguments.ahead, arguments.peak_s)]
        say(str(peaks[0]))
        rate = arguments.factor * peaks[0].requests_per_s
        over = await opened(client, f"{arguments.factor:g} × peak", rate, arguments.seconds, arguments.seed,
                            server.pid)  # fmt: skip
        say(str(over))
        await asyncio.sleep(2.0)
        peaks.append(await closed(client, "peak again", arguments.places + arguments.ahead, arguments.peak_s))
        say(str(peaks[1]))
    finally:
        await client.close()
    peak = max(peaks, key=lambda load: load.goodput)
    figures, wrong = judge(peak, over, arguments)
    loads = {
        load.name: {
            "requests_per_s": round(load.requests_per_s, 2),
            "goodput_tokens_per_s": round(load.goodput, 1),
            **load.percentiles(),
        }
        for load in (alone, *peaks, over)
    }
    return {"offered_per_s": round(rate, 1), "loads": loads, "overload": figures, "wrong": wrong}, wrong


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--factor", type=float, default=10.0, help="times the peak's rate (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default: %(default)s)")
    parser.add_argument("--peak-s", type=float, default=30.0, help="of each peak (default: %(default)s)")
    parser.add_argument("--places", type=int, default=8, help="of the target (default: %(default)s)")
    parser.add_argument("--queue-wait-s", type=float, default=5.0, help="longest wait (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--goodput-min", type=float, default=0.9, help="of the peak (default: %(default)s)")
    parser.add_argument("--slower-max", type=float, default=1.5, help="times the peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.ahead = -(-given.places // 8)  # waiting at the target, so that it never runs dry
    return given


async def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    limits = ("--max-num-seqs", str(arguments.places), "--max-queue-wait", str(arguments.queue_wait_s))
    with target_model(arguments) as target:
        async with running_outrider(target, arguments.draft, *limits) as server:
            return await measure(arguments, server, server.asked.url)


def main() -> int:
    arguments = parse()
    result, wrong = asyncio.run(run(arguments))
    report(arguments, {"machine": machine(), "arguments": given(arguments), **result})
    for each in wrong:
        say(f"NOT WITHIN BOUNDS: {each}")
    return 1 if wrong else 0
