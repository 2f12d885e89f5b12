"""One run: a system, two tenants, and each attack in turn with an equally large ordinary load between its rounds.

    round 1:  attack, ordinary load        round 2:  ordinary load, attack        and so on

The neighbour sends its trickle all the time. The hostile tenant runs in a process of its own, with less of the
processor than anybody else, so that only the load that it causes is measured. Before a comparison counts as failed
it is measured anew. A system of which a process ended is replaced by a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import redis.exceptions

from coordinator.settings import Hosting
from outrider.security.tls import Role
from tests.e2e.fuzz import footprint
from tests.e2e.fuzz.lag import OWN, Histogram
from tests.e2e.secured import SecuredOptions, SecuredSystem
from tests.e2e.tenants import judge
from tests.e2e.tenants.access import Access
from tests.e2e.tenants.attacker import Tally
from tests.e2e.tenants.judge import Comparison, Lag, Limits, Memory, Row
from tests.e2e.tenants.neighbour import Neighbour, Sample
from tests.e2e.tenants.scenario import Load, Scenario, run_attack, run_ordinary
from tests.e2e.tenants.work import REQUESTS_PER_MINUTE

KEY_LIMITS: Final = f"[tenants.bounded]\nrequests_per_minute = {REQUESTS_PER_MINUTE}\n"
SETTLE_MAX_S: Final = 20.0
IDLE_MAX_S: Final = 60.0
RESPONDING_MAX_S: Final = 120.0
FIRST_LOAD: Final = Load(num_requests=10_000, num_tokens=32, num_clients=32)
WARM_UP_BODIES: Final = 16
WARM_SHARE: Final = 0.03
"""A process is warm that grows by less than this in a round of an ordinary load: allocators have their arenas then, and
each KV block was touched once."""
HOSTILE_ADDRESS: Final = "127.0.0.2"
ESCAPE: Final = b"\x1b]52;"


@dataclass(frozen=True)
class Plan:
    """The attacks of a run, and how they are measured."""

    scenarios: Sequence[Scenario]
    hosting: Hosting
    seconds: float  # of each attack in each round
    per_s: float  # requests of the neighbour
    seed: int
    limits: Limits = field(default_factory=Limits)
    num_rounds: int = 2
    num_warm_up_rounds: int = 6  # at most


@dataclass
class Measurements:
    """The rounds of one attack."""

    attacked: list[Sample] = field(default_factory=list)
    ordinary: list[Sample] = field(default_factory=list)
    after: list[Memory] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)  # event loops
    tally: Tally = field(default_factory=Tally)
    num_ordinary: int = 0


class Experiment:
    """A run that follows one plan; `run` it once."""

    def __init__(self, plan: Plan, log_dir: Path, say: Callable[[str], None]) -> None:
        self._plan, self._log_dir, self._say = plan, log_dir, say
        self._num_systems = 0
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    async def run(self) -> list[Row]:
        rows: list[Row] = []
        waiting = list(self._plan.scenarios)
        try:
            while waiting:
                async with self._running() as (system, neighbour):
                    while waiting:
                        row, is_measured = await self._judged(system, neighbour, waiting.pop(0))
                        rows.append(row)
                        if not is_measured or not await self._is_whole(system):
                            self._say("   the system is replaced.")
                            break
        finally:
            self._pool.shutdown(cancel_futures=True)
        return rows

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[SecuredSystem, Neighbour]]:
        self._num_systems += 1
        self._say(f"Starting Redis, a target, a draft and a coordinator ({self._plan.hosting}).")
        options = SecuredOptions(max_model_len=1024, limits=KEY_LIMITS, hosting=self._plan.hosting, drain_grace_s=5.0)
        async with SecuredSystem(options, self._log_dir / f"system-{self._num_systems}") as system:
            neighbour = Neighbour(access(system, system.key))
            try:
                await neighbour.record_expected()
                await self._warm_up(system, neighbour)
                yield system, neighbour
            finally:
                await neighbour.close()

    async def _warm_up(self, system: SecuredSystem, neighbour: Neighbour) -> None:
        await neighbour.send_largest(WARM_UP_BODIES)
        for index in range(self._plan.num_warm_up_rounds):
            before = _resident(system)
            await self._arm(system, neighbour, partial(run_ordinary, FIRST_LOAD), f"{self._plan.seed} {index}")
            await neighbour.until_quiet(IDLE_MAX_S)
            now = _resident(system)
            if all(now.get(name, 0) <= then * (1 + WARM_SHARE) for name, then in before.items()):
                return

    async def _is_whole(self, system: SecuredSystem) -> bool:
        """Whether the next attack meets a system as it was started."""
        neighbour = Neighbour(access(system, system.key))
        try:
            await neighbour.record_expected()
        except AssertionError as error:
            self._say(f"   the system does not serve any more: {error}")
            return False
        finally:
            await neighbour.close()
        return not system.ends

    async def _judged(self, system: SecuredSystem, neighbour: Neighbour, one: Scenario) -> tuple[Row, bool]:
        """Returns also whether everything could be measured."""
        row, began_s, is_measured = Row(one.name, one.point, one.text), time.monotonic(), True
        self._say(f"{one.name}: {one.text}")
        try:
            await self._measure(system, neighbour, one, row)
        except (httpx.HTTPError, psutil.Error, redis.exceptions.RedisError, OSError, LookupError) as error:
            is_measured = False
            row.faults.append(f"the system could not be measured: {type(error).__name__}: {error}")
        row.faults += [f"ended: {each[:120]}" for each in system.ends]
        if self._has_escapes(system):
            row.faults.append("a log has an escape sequence as it was sent")
        row.seconds = time.monotonic() - began_s
        self._say(f"   {'; '.join(row.faults) or 'holds'} ({row.seconds:.0f} s)")
        return row, is_measured

    async def _measure(self, system: SecuredSystem, neighbour: Neighbour, one: Scenario, row: Row) -> None:
        replicas, before = _replicas(system), _resident(system)
        measured = await self._rounds(system, neighbour, one, "first")
        slow, late = self._compared(measured), measured.late
        if any(each.is_exceeded for each in slow) or late:
            self._say("   a limit is exceeded; it is measured anew.")
            again = await self._rounds(system, neighbour, one, "again")
            slow, late = self._compared(again), again.late
            measured.after += again.after
            measured.peaks = {name: max(peak, again.peaks.get(name, 0)) for name, peak in measured.peaks.items()}
            measured.attacked += again.attacked
            measured.tally.answers += again.tally.answers
            measured.tally.faults += again.tally.faults
            measured.tally.num_requests += again.tally.num_requests
            measured.num_ordinary += again.num_ordinary
        row.comparisons, row.num_samples = slow, len(measured.attacked)
        row.num_requests, row.answers = measured.tally.num_requests, measured.tally.answers
        row.num_ordinary = measured.num_ordinary
        after = measured.after[-1]
        row.memory_mib = {
            name: (before[name] >> 20, measured.peaks.get(name, 0) >> 20, after.get(name, 0) >> 20) for name in before
        }
        row.faults += [*measured.tally.faults, *judge.answer_faults(measured.attacked, self._plan.limits)]
        row.faults += [str(each) for each in slow if each.is_exceeded]
        row.faults += judge.memory_faults(before, measured.after, measured.peaks, self._plan.limits.kept_once_bytes)
        row.faults += late
        if self._plan.num_rounds > 1 or one is self._plan.scenarios[-1]:  # an abandoned reservation takes 15 s to end
            row.faults += await self._left_behind(system)
        row.faults += [f"ended: {name}" for name in sorted(replicas - _replicas(system))]

    def _compared(self, measured: Measurements) -> list[Comparison]:
        return judge.compare_all(measured.ordinary, measured.attacked, self._plan.limits)

    async def _rounds(self, system: SecuredSystem, neighbour: Neighbour, one: Scenario, which: str) -> Measurements:
        """Attack and ordinary load by turns, each first in every other round."""
        found, load = Measurements(), Load(1, 1, 1)
        for index in range(self._plan.num_rounds if one.is_load else 1):
            for is_attack in ((True, False) if index % 2 == 0 else (False, True))[: 2 if one.is_load else 1]:
                seed = f"{self._plan.seed} {one.name} {which} {index}"
                if not is_attack:
                    samples, tally = await self._arm(system, neighbour, partial(run_ordinary, load), seed)
                    found.ordinary += samples
                    found.num_ordinary += tally.num_requests
                    await neighbour.until_quiet(IDLE_MAX_S)
                    continue
                before, wanted = await self._lag(system), _resident(system)
                _forget_peaks(system)
                samples, tally = await self._arm(system, neighbour, partial(run_attack, one.name), seed)
                load = Load.like(tally, one.num_clients)
                found.attacked += samples
                found.tally.num_requests += tally.num_requests
                found.tally.answers += tally.answers
                found.tally.faults += tally.faults
                found.late += await self._late(system, before)
                if (group := await neighbour.until_quiet(IDLE_MAX_S)) is not None:
                    found.tally.fault(f"a minute later, {group} still wait for what the attack has left behind")
                for name, peak in _peaks(system).items():
                    found.peaks[name] = max(peak, found.peaks.get(name, 0))
                found.after.append(await _settled(system, found.after[0] if found.after else wanted))
        return found

    async def _arm(
        self, system: SecuredSystem, neighbour: Neighbour, load: Callable[[Access, float, str], Tally], seed: str
    ) -> tuple[list[Sample], Tally]:
        """The neighbour's trickle beside a load; returns both when everything of the neighbour's is answered."""
        hostile = replace(access(system, system.other_key), source=HOSTILE_ADDRESS)
        seconds, per_s = self._plan.seconds, self._plan.per_s
        running = asyncio.get_running_loop().run_in_executor(self._pool, load, hostile, seconds, seed)
        samples = await neighbour.trickle(seconds, per_s, seed)
        return samples, await running

    async def _lag(self, system: SecuredSystem) -> dict[str, Histogram]:
        return {name: Histogram.parse(await _page(system, name), OWN) for name in system.children}

    async def _late(self, system: SecuredSystem, before: dict[str, Histogram]) -> list[str]:
        now = await self._lag(system)
        lags = {name: Lag.between(before[name], now[name]) for name in now.keys() & before.keys()}
        return [fault for name, lag in sorted(lags.items()) if (fault := lag.fault(name)) is not None]

    async def _left_behind(self, system: SecuredSystem) -> list[str]:
        """Waits until no process has anything of either tenant. Returns what is left after a minute."""
        for name in system.children:
            await _page(system, name)
        return [f"left behind: {each}" for each in await footprint.until_idle(system, IDLE_MAX_S)]

    @staticmethod
    def _has_escapes(system: SecuredSystem) -> bool:
        return any(ESCAPE in path.read_bytes() for path in system.log_dir.glob("*.log"))


def access(system: SecuredSystem, key: str) -> Access:
    """The system's public ports, as a tenant with this key knows them."""
    has_tls = system.url().startswith("https:")
    return Access(
        url=system.url(),
        grpc_address=system.grpc_address(),
        key=key,
        authority=str(system.certificates / "ca.crt") if has_tls else None,
        bounded_key=system.bounded_key,
        worker_redis_url=system.redis_url_file(Role.TARGET).read_text().strip(),
        worker_ids=tuple(system.names("target") + system.names("draft")),
    )


async def _page(system: SecuredSystem, name: str) -> str:
    """The metrics of a process, which may take long to answer after an attack."""
    until_s = time.monotonic() + RESPONDING_MAX_S
    while True:
        try:
            return await system.metrics(name)
        except httpx.HTTPError:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.2)


def _processes(system: SecuredSystem) -> dict[str, psutil.Process]:
    """Processes that requests go through, by name; those of Ray with their ids."""
    found = {}
    for name, pid in system.pids().items():
        with contextlib.suppress(psutil.Error):
            found[name] = psutil.Process(pid)
            for child in found[name].children(recursive=True):
                line = " ".join(child.cmdline())
                what = "replica" if "ServeReplica" in line else "HAProxy" if "haproxy" in line else None
                if what is not None:
                    found[f"{name}/{what} {child.pid}"] = child
    return found


def _replicas(system: SecuredSystem) -> set[str]:
    return {name for name in _processes(system) if "replica" in name}


def _resident(system: SecuredSystem) -> dict[str, int]:
    return _read(system, lambda process: process.memory_info().rss)


def _forget_peaks(system: SecuredSystem) -> None:
    """Starts the kernel's record of the most memory of each process anew."""
    for process in _processes(system).values():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _peaks(system: SecuredSystem) -> dict[str, int]:
    def peak(process: psutil.Process) -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    return _read(system, peak)


def _read(system: SecuredSystem, look: Callable[[psutil.Process], int]) -> dict[str, int]:
    found = {}
    for name, process in _processes(system).items():
        with contextlib.suppress(psutil.Error, OSError, StopIteration):
            found[name] = look(process)
    return found


async def _settled(system: SecuredSystem, wanted: Memory) -> Memory:
    """The memory of every process, once it is what is wanted, or after a while."""
    until_s = time.monotonic() + SETTLE_MAX_S
    while True:
        now = _resident(system)
        if judge.has_settled(wanted, now) or time.monotonic() > until_s:
            return now
        await asyncio.sleep(0.5)


def report(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was counted, as JSON."""
    return {
        "hosting": str(plan.hosting),
        "seconds": plan.seconds,
        "is_clean": not any(row.faults for row in rows),
        "rows": [row.to_json() for row in rows],
    }
