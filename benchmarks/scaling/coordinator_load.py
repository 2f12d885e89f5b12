"""Measures what one coordinator replica costs per step and stream, in front of targets without a model.

The coordinator is the real process. Target workers have the product's service and scheduler and no model; they, the
clients and Redis are processes of their own. Streams commit four tokens a step at a rate that two cores can feed.
`idle` streams are requests that wait for a slot in the coordinator, but for a few that wait at their targets.

For each number of streams it reports the coordinator's processor time per step and stream (user and system), its memory
per stream, and the delay of a step from the target's commit to the client. The protocol `target` is the same without
a coordinator: its delay is what fake targets and clients add.

With `--against DIR` the coordinator of another checkout is measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.scaling.fake_fleet import Front, fake_targets, front, registry
from benchmarks.shared.figures import percentile, rounded, spread
from benchmarks.shared.json_process import JsonProcess
from benchmarks.shared.machine import ROOT, machine
from benchmarks.shared.options import given, report, say
from benchmarks.shared.step_stamps import STAMP_CHARS

ACTIVE, IDLE = "active", "idle"
_OPEN_PER_S: Final = 150.0
_PROMPT_TOKENS: Final = 16
_STREAM_S: Final = 600.0
"""Length of a stream: longer than a level, and short enough for its deadline by the targets' own forecast."""
_IDLE_TARGETS: Final = 20


@dataclass(frozen=True, slots=True)
class Level:
    """Streams that are open at once."""

    protocol: str  # http, grpc, or target
    num_active: int
    num_idle: int = 0

    def __str__(self) -> str:
        idle = f" and {self.num_idle} idle" if self.num_idle else ""
        return f"{self.protocol}, {self.num_active}{idle}"


class Used(NamedTuple):
    """Processor time of each part, in seconds."""

    coordinator: float
    proxy: float
    targets: float
    clients: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one window of time."""

    seconds: float
    num_steps: int
    used: Used
    resident_bytes: int
    delays_ms: Sequence[float]
    num_chunks: int
    failures: dict[str, int]

    def figures(self, level: Level, empty_bytes: int) -> dict[str, float]:
        """Figures of the window; `empty_bytes` is the coordinator's memory without any stream."""
        num_streams = level.num_active + level.num_idle
        return {
            "steps_per_s": rounded(self.num_steps / self.seconds),
            "cpu_us_per_step": rounded(1e6 * self.used.coordinator / max(self.num_steps, 1)),
            "coordinator_cores": rounded(self.used.coordinator / self.seconds),
            "proxy_cores": rounded(self.used.proxy / self.seconds),
            "targets_cores": rounded(self.used.targets / self.seconds),
            "clients_cores": rounded(self.used.clients / self.seconds),
            "steps_per_chunk": rounded(self.num_steps / max(self.num_chunks, 1)),
            "delay_p50_ms": rounded(percentile(self.delays_ms, 0.5)),
            "delay_p99_ms": rounded(percentile(self.delays_ms, 0.99)),
            "memory_kib_per_stream": rounded((self.resident_bytes - empty_bytes) / 1024 / max(num_streams, 1)),
            "failures": sum(self.failures.values()),
        }


@dataclass(frozen=True, slots=True)
class System:
    """The processes of one coordinator under test."""

    front: Front
    active: JsonProcess
    idle: JsonProcess
    output_tokens: int  # of a stream

    async def open(self, protocol: str, model: str, num: int) -> None:
        """Opens streams and waits until the coordinator has them: running, or waiting if they are idle."""
        if protocol == "target":
            addresses = self.active.facts["addresses"]
            for index, address in enumerate(addresses):
                share = num * (index + 1) // len(addresses) - num * index // len(addresses)
                await self._order(protocol, model, share, address)
            return
        await self._order(protocol, model, num, self.front.address(protocol))
        gauge = "outrider_num_requests_running" if model == ACTIVE else "outrider_num_requests_waiting"
        await self.front.wait_for(gauge, {"model_name": model}, num)

    async def _order(self, protocol: str, model: str, num: int, address: str) -> None:
        await self.front.clients.ask(
            do="open",
            protocol=protocol,
            address=address,
            model=model,
            num=num,
            per_s=_OPEN_PER_S,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=[self.output_tokens] * 2,
            repeats=False,
            stamps=model == ACTIVE,
            token_ids=self.active.facts["token_ids"],
        )

    async def close(self) -> None:
        """Ends all streams and waits until the coordinator has none."""
        await self.front.clients.ask(do="close")
        for model in (ACTIVE, IDLE):
            for gauge in ("running", "waiting"):
                await self.front.wait_for(f"outrider_num_requests_{gauge}", {"model_name": model}, 0)

    def used(self) -> Used:
        """Processor time so far."""
        ours, proxy = (
            sum(sum(each.cpu_times()[:2]) for each in group) for group in (self.front.serving, self.front.proxies)
        )
        return Used(ours, proxy, self.active.cpu_s() + self.idle.cpu_s(), self.front.clients.cpu_s())


@asynccontextmanager
async def system(arguments: argparse.Namespace, checkout: Path, redis_url: str) -> AsyncIterator[System]:
    """Starts everything but Redis; stops it afterwards."""
    # As many targets as the largest level fills. Idle ones have one slot each, so that all but a few requests wait.
    num_active = -(-max([*arguments.active, arguments.active_beside_idle]) // arguments.sessions)
    idle_flags = {"targets": _IDLE_TARGETS, "max_num_seqs": 1, "max_num_waiting": 400, "fixed_ms": 1e6}
    async with (
        fake_targets(ACTIVE, redis_url, stamps=True, spread=0.1, targets=num_active, max_num_seqs=arguments.sessions,
                     fixed_ms=1e3 / arguments.steps_per_s) as active,
        fake_targets(IDLE, redis_url, **idle_flags) as idle,
        front(redis_url, num_active + _IDLE_TARGETS, hosting=arguments.hosting, checkout=checkout) as found,
    ):  # fmt: skip
        yield System(found, active, idle, STAMP_CHARS * math.ceil(_STREAM_S * arguments.steps_per_s))


async def window(found: System, seconds: float) -> Sample:
    """Measures for some seconds."""
    clients = found.front.clients
    await clients.ask(do="begin")
    before, began_s = found.used(), time.monotonic()
    await asyncio.sleep(seconds)
    after, ended_s = found.used(), time.monotonic()
    counted = await clients.ask(do="end")
    used = Used(*(now - then for now, then in zip(after, before, strict=True)))
    delays = counted["delays_ms"]
    # The clients' window is a little longer than the processor's.
    num_steps = round(len(delays) * (ended_s - began_s) / counted["seconds"])
    return Sample(
        ended_s - began_s,
        num_steps,
        used,
        found.front.resident_bytes(),
        delays,
        counted["num_chunks"],
        counted["failures"],
    )


async def measure(found: System, levels: Sequence[Level], arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measures all levels, one after the other."""
    empty_bytes, figures = found.front.resident_bytes(), []
    for level in levels:
        for model, num in ((IDLE, level.num_idle), (ACTIVE, level.num_active)):
            if num:
                await found.open(level.protocol, model, num)
        await asyncio.sleep(arguments.settle_s)
        sample = await window(found, arguments.seconds)
        figures.append(sample.figures(level, empty_bytes))
        say(f"{level}: {figures[-1]} {sample.failures or ''}")
        await found.close()
    return figures


def levels_of(arguments: argparse.Namespace) -> list[Level]:
    """The levels that the flags ask for: active streams alone, then with idle ones beside them."""
    found = []
    for protocol in arguments.protocol:
        found += [Level(protocol, num) for num in arguments.active]
        if protocol != "target":
            found += [Level(protocol, arguments.active_beside_idle, num) for num in arguments.idle]
    return found


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    checkouts = {"ours": ROOT} | ({} if arguments.against is None else {"against": arguments.against.resolve()})
    levels = levels_of(arguments)
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in checkouts}
    with registry() as url:
        for number in range(arguments.rounds):
            for name, checkout in list(checkouts.items())[:: -1 if number % 2 else 1]:
                rounds[name].append([])
                for protocol in arguments.protocol:  # anew for each: memory, and what coordinators learn of a load
                    say(f"round {number + 1} of {arguments.rounds}, {name}, {protocol}")
                    own = [level for level in levels if level.protocol == protocol]
                    async with system(arguments, checkout, url) as found:
                        rounds[name][-1] += await measure(found, own, arguments)
    return {"levels": {str(level): summary(rounds, index) for index, level in enumerate(levels)}}


def summary(rounds: dict[str, list[list[dict[str, float]]]], index: int) -> dict[str, Any]:
    """Medians and quartiles of a level's figures over rounds, by checkout, and the ratio of ours to the other."""
    found: dict[str, Any] = {}
    for name, measured in rounds.items():
        samples = [each[index] for each in measured]
        found[name] = {key: spread([sample[key] for sample in samples]) for key in samples[0]}
    if len(rounds) > 1:
        ours, theirs = (
            [each[index]["cpu_us_per_step"] for each in measured] for measured in (rounds["ours"], rounds["against"])
        )
        found["cpu_ours_over_against"] = spread([our / their for our, their in zip(ours, theirs, strict=True)])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--protocol", nargs="+", choices=("http", "grpc", "target"), default=["http", "grpc"], help="(default: both)"
    )
    parser.add_argument("--active", type=int, nargs="*", default=[100, 500, 1000], help="(default: %(default)s)")
    parser.add_argument("--idle", type=int, nargs="*", default=[2000], help="(default: %(default)s)")
    parser.add_argument("--active-beside-idle", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--steps-per-s", type=float, default=2.0, help="of a stream (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=64, help="of a target (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a level (default: %(default)s)")
    parser.add_argument("--settle-s", type=float, default=3.0, help="before it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--hosting", choices=("plain", "ray-serve"), default="plain", help="(default: %(default)s)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare with")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    result = asyncio.run(run(arguments))
    report(arguments, {"machine": machine(), "arguments": given(arguments), **result})
