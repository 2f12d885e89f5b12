"""Limits how many sequences a tenant may have at once, counted in Redis for all coordinators together.

    or:running:TENANT  sorted set: the tenant's sequences, waiting or running, by the moment they end unless renewed

A request counts every sequence it generates (`n`, or `best_of`), from before its prompt is sent anywhere until its last
sequence has ended. A resumed request may be admitted up to twice the limit, because its sequences at the lost replica
still count for RESERVATION_S.

Without Redis each coordinator applies the limit to the sequences it admitted itself: the limit is then per replica.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from redis.commands.core import AsyncScript

from coordinator.access.api_keys import Caller
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import InvalidRequest, Overloaded, RegistryUnavailable
from outrider.registry.redis_connection import CLOCK_LUA
from outrider.registry.registry import RENEW_S, RESERVATION_S, Registry
from outrider.security.tenants import tenant_digest

_log = logging.getLogger(__name__)

_AWAY_S: Final = 2.0  # how long Redis is not asked after it has not answered
_CLOSED_S: Final = 0.5  # how long a refused tenant is refused again without asking Redis
_BEGUN_FACTOR: Final = 2
_MEMBERS_AT_ONCE: Final = 1024  # per call; Lua's `unpack` and Redis' time are limited

# KEYS: a tenant's sequences. ARGV: the limit, a lifetime in ms, then names of sequences. Admits all (1) or none (0).
_TAKE: Final = f"""{CLOCK_LUA}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) + #ARGV - 2 > tonumber(ARGV[1]) then return 0 end
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
return 1
"""
# KEYS: a tenant's sequences. ARGV: a lifetime in ms, then names of running sequences, added if they had expired.
_RENEW: Final = f"""{CLOCK_LUA}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
return 1
"""
# KEYS: a tenant's sequences. ARGV: names.
_RELEASE: Final = "return redis.call('ZREM', KEYS[1], unpack(ARGV))"


@dataclass(frozen=True, slots=True)
class Held:
    """Sequences of one request that count towards its tenant's limit."""

    tenant: str
    names: tuple[str, ...]  # unique over all requests


class ConcurrencyLimits:
    """Counts one replica's sequences by tenant and renews them in Redis while the context is open."""

    def __init__(self, registry: Registry | None, now_s: Callable[[], float], renew_s: float = RENEW_S) -> None:
        """`registry` answers quickly or counts as unavailable; None: this is the only replica."""
        self._registry = registry
        self._now_s = now_s
        self._renew_s = renew_s
        if registry is not None:
            self._take = registry.register_script(_TAKE)
            self._renew = registry.register_script(_RENEW)
            self._release = registry.register_script(_RELEASE)
        self._running: dict[str, dict[str, None]] = {}  # names of sequences by tenant
        self._ended: dict[str, dict[str, None]] = {}  # ended sequences that Redis still counts
        self._has_ended = asyncio.Event()
        self._closed: dict[str, tuple[float, int]] = {}  # until when, for how many sequences or more
        self._away_until_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._registry is not None:
            self._tasks = [
                asyncio.create_task(
                    keep_going(self._keep_renewing, "renewing concurrency limits"), name="concurrency limits"
                ),
                asyncio.create_task(
                    keep_going(self._keep_releasing, "releasing ended sequences"), name="ended sequences"
                ),
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)
        await self._release_all()

    def check(self, caller: Caller, num: int, retry_after_s: float, parameter: str = "n") -> None:
        """Refuses what `hold` would refuse, as far as this replica knows, before the prompt is read.
        Raises Overloaded, or InvalidRequest naming `parameter` if the request alone exceeds the tenant's limit."""
        limit = caller.limits.max_concurrent_sequences
        if limit is None or caller.tenant is None:
            return
        if num > limit:
            raise InvalidRequest(
                parameter,
                f"tenant {caller.tenant} may have {limit} sequences at once, and this request alone has {num}",
            )
        until_s, closed_to = self._closed.get(caller.tenant, (0.0, num))
        is_closed = self._now_s() < until_s and num >= closed_to
        if is_closed or len(self._running.get(caller.tenant, ())) + num > limit:
            raise _too_many(caller, retry_after_s)

    async def hold(
        self, caller: Caller, num: int, retry_after_s: Callable[[], float], *, has_begun: bool = False
    ) -> Held | None:
        """Counts `num` sequences until `release`; None if they are not limited. Raises Overloaded at the limit."""
        limit, tenant = caller.limits.max_concurrent_sequences, caller.tenant
        if limit is None or tenant is None:
            return None
        run = uuid.uuid4().hex
        held = Held(tenant, tuple(f"{run}:{index}" for index in range(num)))
        # Before Redis is asked, since other requests arrive meanwhile.
        self._running.setdefault(tenant, {}).update(dict.fromkeys(held.names))
        is_admitted = False
        try:
            is_admitted = await self._admit(held, limit * (_BEGUN_FACTOR if has_begun else 1))
        finally:
            if not is_admitted:
                self.release(held)
        if not is_admitted:
            if not has_begun:
                self._closed[tenant] = self._now_s() + _CLOSED_S, num
            raise _too_many(caller, retry_after_s())
        return held

    def release(self, held: Held | None) -> None:
        """Ends the count of one `hold`."""
        if held is None:
            return
        own = self._running[held.tenant]
        for name in held.names:
            del own[name]
        if not own:
            del self._running[held.tenant]
        self._report_ended(held.tenant, held.names)

    def _report_ended(self, tenant: str, names: Iterable[str]) -> None:
        if self._registry is not None:
            self._ended.setdefault(tenant, {}).update(dict.fromkeys(names))
            self._has_ended.set()

    async def _admit(self, held: Held, limit: int) -> bool:
        if self._registry is not None:
            life_ms = int(RESERVATION_S * 1000)
            answer = await self._ask(self._take, held.tenant, limit, life_ms, *held.names)
            if answer is not None:
                return bool(answer)
        # Only the sequences that came before it count.
        return list(self._running[held.tenant]).index(held.names[-1]) < limit

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            self._closed = {tenant: closed for tenant, closed in self._closed.items() if closed[0] > self._now_s()}
            for tenant, own in list(self._running.items()):
                for names in _parts(list(own)):
                    if await self._ask(self._renew, tenant, int(RESERVATION_S * 1000), *names) is None:
                        break
                    back = [name for name in names if name not in own]  # renewed though ended
                    if back:
                        self._report_ended(tenant, back)

    async def _keep_releasing(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            await self._release_all()

    async def _release_all(self) -> None:
        """Removes ended sequences from Redis; those it cannot remove expire there."""
        while self._ended:
            tenant, ended = self._ended.popitem()
            for names in _parts(list(ended)):
                await self._ask(self._release, tenant, *names)

    async def _ask(self, script: AsyncScript, tenant: str, *arguments: str | int) -> Any:
        """Runs a script on a tenant's sequences; None if Redis does not answer."""
        if self._registry is None or self._now_s() < self._away_until_s:
            return None
        try:
            return await self._registry.ask(script(keys=[_key(tenant)], args=list(arguments)))
        except RegistryUnavailable as error:
            if self._now_s() >= self._away_until_s:
                _log.warning("this replica counts tenants' sequences by itself: %s", error.message)
            self._away_until_s = self._now_s() + _AWAY_S
            return None


def _parts(names: list[str]) -> list[list[str]]:
    return [names[start : start + _MEMBERS_AT_ONCE] for start in range(0, len(names), _MEMBERS_AT_ONCE)]


def _key(tenant: str) -> str:
    return f"or:running:{tenant_digest(tenant)}"


def _too_many(caller: Caller, retry_after_s: float) -> Overloaded:
    return Overloaded(
        f"tenant {caller.tenant} may have {caller.limits.max_concurrent_sequences} sequences at once, and this request "
        "would be more; it may be sent again when some have ended",
        retry_after_s,
    )
