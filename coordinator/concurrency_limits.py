"""How many sequences a tenant may have at once: counted in Redis, so that all coordinators together keep to it.

    or:running:TENANT  sorted set: the tenant's sequences, waiting or running, by the moment they end unless renewed

A request counts as many as it generates (`n`, or `best_of`), from before its prompt is sent anywhere until its last
sequence has ended. One that goes on after a break may be let in up to twice the limit: what it was at the replica that
died still counts for RESERVATION_S, and what a tenant is in the middle of does not break with that.

Without Redis each coordinator keeps to the limit by itself, with what it has let in: then it holds per replica.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self

from redis.commands.core import AsyncScript

from outrider.api_keys import Caller
from outrider.background import end_tasks, keep_going
from outrider.errors import InvalidRequest, Overloaded, RegistryUnavailable
from outrider.redis_connection import CLOCK_LUA
from outrider.registry import RENEW_S, RESERVATION_S, Registry
from outrider.tenants import tenant_digest

_log = logging.getLogger(__name__)

_AWAY_S: Final = 2.0  # how long Redis is not asked after it has not answered
_CLOSED_S: Final = 0.5  # how long a tenant that was refused is refused without asking
_BEGUN_FACTOR: Final = 2
_MEMBERS_AT_ONCE: Final = 1024  # in one call; Lua's `unpack` and Redis' time have bounds

# KEYS: a tenant's sequences. ARGV: the limit, a life in ms, then the names of sequences. Returns 1 when they are let
# in, all or none.
_TAKE: Final = f"""{CLOCK_LUA}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) + #ARGV - 2 > tonumber(ARGV[1]) then return 0 end
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2])
return 1
"""
# KEYS: likewise. ARGV: a life in ms, then names, which are there afterwards whether they were or not: they run.
_RENEW: Final = f"""{CLOCK_LUA}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
return 1
"""
# KEYS: likewise. ARGV: names.
_RELEASE: Final = "return redis.call('ZREM', KEYS[1], unpack(ARGV))"


@dataclass(frozen=True, slots=True)
class Held:
    """Sequences of one request that count towards its tenant's limit."""

    tenant: str
    names: tuple[str, ...]  # never the same twice


class ConcurrencyLimits:
    """What tenants have running at one replica; renewed in Redis while the context is open."""

    def __init__(
        self, registry: Registry | None, now_s: Callable[[], float], renew_s: float = RENEW_S
    ) -> None:
        """`registry` answers quickly or counts as away; None: this replica is alone."""
        self._registry = registry
        self._now_s = now_s
        self._renew_s = renew_s
        if registry is not None:
            self._take = registry.register_script(_TAKE)
            self._renew = registry.register_script(_RENEW)
            self._release = registry.register_script(_RELEASE)
        self._running: dict[str, dict[str, None]] = {}  # names of sequences by tenant
        self._ended: dict[str, dict[str, None]] = {}  # of these, what Redis has not been told
        self._has_ended = asyncio.Event()
        self._closed: dict[str, tuple[float, int]] = {}  # until when, to how many sequences and more
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
        """Raises what `hold` would, as far as this replica knows: before as much as a look at the prompt. Raises
        InvalidRequest for more sequences than the tenant may have at all, which `parameter` asks for."""
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
        """Counts so many sequences until `release`; None where they are not limited. Raises Overloaded where the tenant
        has too many."""
        limit, tenant = caller.limits.max_concurrent_sequences, caller.tenant
        if limit is None or tenant is None:
            return None
        run = uuid.uuid4().hex
        held = Held(tenant, tuple(f"{run}:{index}" for index in range(num)))
        # At once: others come while Redis is asked.
        self._running.setdefault(tenant, {}).update(dict.fromkeys(held.names))
        is_let_in = False
        try:
            is_let_in = await self._let_in(held, limit * (_BEGUN_FACTOR if has_begun else 1))
        finally:
            if not is_let_in:
                self.release(held)
        if not is_let_in:
            if not has_begun:
                self._closed[tenant] = self._now_s() + _CLOSED_S, num
            raise _too_many(caller, retry_after_s())
        return held

    def release(self, held: Held | None) -> None:
        """Reverses one `hold`."""
        if held is None:
            return
        own = self._running[held.tenant]
        for name in held.names:
            del own[name]
        if not own:
            del self._running[held.tenant]
        self._tell_ended(held.tenant, held.names)

    def _tell_ended(self, tenant: str, names: Iterable[str]) -> None:
        if self._registry is not None:
            self._ended.setdefault(tenant, {}).update(dict.fromkeys(names))
            self._has_ended.set()

    async def _let_in(self, held: Held, limit: int) -> bool:
        if self._registry is not None and self._now_s() >= self._away_until_s:
            arguments: list[str | int] = [limit, int(RESERVATION_S * 1000), *held.names]
            try:
                return bool(await self._registry.ask(self._take(keys=[_key(held.tenant)], args=arguments)))
            except RegistryUnavailable as error:
                self._miss(error)
        # Those that came before it count, and of those that came after it none.
        return list(self._running[held.tenant]).index(held.names[-1]) < limit

    def _miss(self, error: RegistryUnavailable) -> None:
        if self._now_s() >= self._away_until_s:
            _log.warning("this replica counts tenants' sequences by itself: %s", error.message)
        self._away_until_s = self._now_s() + _AWAY_S

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            self._closed = {
                tenant: closed for tenant, closed in self._closed.items() if closed[0] > self._now_s()
            }
            for tenant, own in list(self._running.items()):
                for names in _parts(list(own)):
                    if not await self._ask(self._renew, tenant, int(RESERVATION_S * 1000), *names):
                        break
                    back = [name for name in names if name not in own]  # ended meanwhile, and back to life
                    if back:
                        self._tell_ended(tenant, back)

    async def _keep_releasing(self) -> None:
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            await self._release_all()

    async def _release_all(self) -> None:
        """What Redis is not told ends there by itself."""
        while self._ended:
            tenant, ended = self._ended.popitem()
            for names in _parts(list(ended)):
                await self._ask(self._release, tenant, *names)

    async def _ask(self, script: AsyncScript, tenant: str, *arguments: str | int) -> bool:
        if self._registry is None or self._now_s() < self._away_until_s:
            return False
        try:
            await self._registry.ask(script(keys=[_key(tenant)], args=list(arguments)))
        except RegistryUnavailable as error:
            self._miss(error)
            return False
        return True


def _parts(names: list[str]) -> list[list[str]]:
    return [names[start : start + _MEMBERS_AT_ONCE] for start in range(0, len(names), _MEMBERS_AT_ONCE)]


def _key(tenant: str) -> str:
    return f"or:running:{tenant_digest(tenant)}"


def _too_many(caller: Caller, retry_after_s: float) -> Overloaded:
    return Overloaded(
        f"tenant {caller.tenant} may have {caller.limits.max_concurrent_sequences} sequences at once, and this request "
        "would be more; it may come back when some have ended",
        retry_after_s,
    )
