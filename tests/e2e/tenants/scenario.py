"""The list of attacks, the ordinary load that each is compared with, and the process in which either runs.

A scenario is a function of one client that is called again and again until the time is over, by several clients at
once. Its docstring says what it does. The control is an equally large ordinary load: at the same concurrency as many
completions of ordinary size as the attack had requests, or as have its bytes together, each for as many tokens, evenly
over the same time. Requests without an answer at the end are left out: the control may not queue what the system could
not serve. Where it cannot serve as many, it gets as many as it can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tests.e2e.tenants.access import Access
from tests.e2e.tenants.attacker import Attacker, Tally

ORDINARY_BYTES: Final = 500  # of a prompt
ORDINARY_TOKENS_MAX: Final = 32
ORDINARY_CLIENTS_MAX: Final = 32
WHOLE_MAX_S: Final = 45.0
"""Time that a counted attack has to take place as a whole, if it needs more than a round."""
NICENESS: Final = 10
"""The hostile client gives way, so that its own work costs the system no processor."""

Attack = Callable[[Attacker], Awaitable[object]]


@dataclass(frozen=True)
class Scenario:
    """One way to harm a neighbour."""

    name: str
    point: int  # of the security reading that found it; 0: a brother of several
    text: str
    attack: Attack
    num_clients: int
    times: int | None  # calls of each client; None: as many as there is time for
    is_load: bool
    """False: an attempt at something that is not permitted, which is judged by its answers alone."""
    is_short: bool  # in the short form, too


@dataclass(frozen=True)
class Load:
    """An ordinary load as large as an attack."""

    num_requests: int
    num_tokens: int  # of each request
    num_clients: int

    @classmethod
    def like(cls, tally: Tally, num_clients: int) -> Load:
        num_requests = max(tally.num_loads, tally.num_bytes // ORDINARY_BYTES, 1)
        num_tokens = round(tally.num_tokens / num_requests)
        return cls(num_requests, min(max(num_tokens, 1), ORDINARY_TOKENS_MAX), min(num_clients, ORDINARY_CLIENTS_MAX))


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(
    point: int, *, clients: int = 4, times: int | None = None, is_load: bool = True, is_short: bool = False
) -> Callable[[Attack], Attack]:
    """Puts a function into the list, under its name."""

    def add(attack: Attack) -> Attack:
        name = attack.__name__.replace("_", "-")
        text = " ".join((attack.__doc__ or "").split())
        assert name not in SCENARIOS
        assert text
        SCENARIOS[name] = Scenario(name, point, text, attack, clients, times, is_load, is_short)
        return attack

    return add


def run_attack(name: str, access: Access, seconds: float, seed: str) -> Tally:
    """Runs one attack to its end; called in a process of its own."""
    # By name: the list is filled by these imports, in the other process as well.
    from tests.e2e.tenants import attempts, connections, grammars, work  # noqa: F401

    one = SCENARIOS[name]

    async def client(attacker: Attacker) -> None:
        num_calls = 0
        while one.times is None or num_calls < one.times:
            await one.attack(attacker)
            num_calls += 1
            await asyncio.sleep(0)

    until_s = seconds if one.times is None else max(seconds, WHOLE_MAX_S)
    return _run(client, one.num_clients, access, seconds, until_s, seed)


def run_ordinary(load: Load, access: Access, seconds: float, seed: str) -> Tally:
    """Runs an ordinary load; called in a process of its own."""
    num_left = load.num_requests
    interval_s = seconds * load.num_clients / load.num_requests

    async def client(attacker: Attacker) -> None:
        nonlocal num_left
        loop = asyncio.get_running_loop()
        due_s = loop.time() + attacker.rng.random() * min(interval_s, seconds / 2)
        while num_left > 0:
            await asyncio.sleep(max(due_s - loop.time(), 0))
            if num_left <= 0:
                return
            num_left -= 1
            due_s = max(due_s + interval_s, loop.time() - interval_s)
            await attacker.complete(attacker.words(ORDINARY_BYTES), load.num_tokens)

    return _run(client, load.num_clients, access, seconds, seconds, seed)


def _run(
    client: Callable[[Attacker], Awaitable[None]],
    num_clients: int,
    access: Access,
    seconds: float,
    until_s: float,
    seed: str,
) -> Tally:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tally = Tally()

    async def run() -> None:
        attackers = [Attacker(access, tally, random.Random(f"{seed} {i}"), seconds) for i in range(num_clients)]
        tasks = [asyncio.ensure_future(client(each)) for each in attackers]
        done, late = await asyncio.wait(tasks, timeout=until_s)
        for task in late:  # which leaves its request, as a client does that goes away
            task.cancel()
            tally.note("left")
        for task in done:
            task.result()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in attackers))

    asyncio.run(run())
    return tally
