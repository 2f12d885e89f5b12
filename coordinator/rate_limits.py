"""What tenants may use in a minute: buckets in Redis, so that all coordinators together keep to it.

    or:limits:TENANT   hash: requests and tokens left, as of a moment of Redis' clock; expires when it would be full

A bucket holds a minute's worth and fills steadily. A request is let in while both of its tenant's buckets have
something left; it pays for itself and its prompt at once, whatever becomes of it, and for its output as that is made,
shown or not, so that a bucket may owe some, and nobody else's output has to be guessed. A stream that goes on after a
break pays as any other, but is let in while its tenant owes less than another minute's worth: what a tenant is in the
middle of does not break with the first refusal, and cannot be begun again for ever.

Without Redis each coordinator keeps to the limits by itself, from what it has let in before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from outrider.api_keys import Caller, TenantLimits
from outrider.background import end_tasks
from outrider.errors import Overloaded, RegistryUnavailable
from outrider.redis_connection import CLOCK_LUA
from outrider.registry import Registry
from outrider.tenants import tenant_digest

_log = logging.getLogger(__name__)

MINUTE_S: Final = 60.0
NEW: Final = 0.0
BEGUN: Final = 1.0
CERTAIN: Final = 1e9
"""Minutes' worth that a tenant may owe and still be let in: with a new request, with one that goes on, and for what has
been used already."""
_AWAY_S: Final = 2.0  # how long Redis is not asked after it has not answered
_FLUSH_S: Final = 0.5  # for which outputs gather before they are charged

# KEYS: a tenant's bucket. ARGV: requests and tokens a minute (0: no limit), then what they cost, then how many minutes'
# worth may be owed. Returns the time until it would be let in, ms; 0 when it was, and has paid.
_CHARGE: Final = (
    CLOCK_LUA
    + """
local at = tonumber(redis.call('HGET', KEYS[1], 'at') or now)
local left, wait, full = {}, 0, 0
for i, name in ipairs({'requests', 'tokens'}) do
  local limit = tonumber(ARGV[i])
  left[i] = 0
  if limit > 0 then
    local before = tonumber(redis.call('HGET', KEYS[1], name) or limit)
    local now_left = math.min(limit, before + math.max(now - at, 0) * limit / 60000)
    local missing = 1 - now_left - ARGV[5] * limit
    if missing > 0 then wait = math.max(wait, math.ceil(missing * 60000 / limit)) end
    left[i] = now_left - ARGV[i + 2]
    full = math.max(full, math.ceil((limit - left[i]) * 60000 / limit))
  end
end
if wait > 0 then return wait end
redis.call('HSET', KEYS[1], 'at', now, 'requests', left[1], 'tokens', left[2])
redis.call('PEXPIRE', KEYS[1], full + 1000)
return 0
"""
)


@dataclass(slots=True)
class Bucket:
    """What a tenant has left, as `_CHARGE` keeps it. Pure."""

    at_s: float
    requests: float
    tokens: float

    @classmethod
    def full(cls, limits: TenantLimits, now_s: float) -> Self:
        return cls(now_s, limits.requests_per_minute or 0.0, limits.tokens_per_minute or 0.0)

    def charge(
        self,
        limits: TenantLimits,
        now_s: float,
        requests: float,
        tokens: float,
        minutes_owed_max: float = NEW,
    ) -> float:
        """Seconds until it would be let in; 0 when it was, and has paid."""
        elapsed_s, self.at_s = max(now_s - self.at_s, 0.0), now_s
        self.requests = _refilled(self.requests, limits.requests_per_minute, elapsed_s)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, elapsed_s)
        wait_s = max(
            _wait_s(self.requests, limits.requests_per_minute, minutes_owed_max),
            _wait_s(self.tokens, limits.tokens_per_minute, minutes_owed_max),
        )
        if wait_s > 0:
            return wait_s
        self.requests -= requests
        self.tokens -= tokens
        return 0.0


class RateLimits:
    """Of one replica; outputs are charged while the context is open."""

    def __init__(self, registry: Registry | None, now_s: Callable[[], float]) -> None:
        """`registry` answers quickly or counts as away; None: this replica is alone."""
        self._registry = registry
        self._now_s = now_s
        self._script = None if registry is None else registry.register_script(_CHARGE)
        # By tenant, of whom there are as many as in the file of keys.
        self._buckets: dict[str, Bucket] = {}  # as if this replica were alone
        self._closed: dict[str, tuple[TenantLimits, float]] = {}  # to new requests, until then
        self._owed: dict[str, tuple[TenantLimits, int]] = {}  # output tokens, to be charged
        self._away_until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        await self.charge_outputs()

    def check(self, caller: Caller) -> None:
        """Raises what `admit` would for a new request of a tenant that was refused a moment ago: before any work."""
        limits, until_s = self._closed.get(caller.tenant or "", (None, 0.0))
        wait_s = until_s - self._now_s()
        if wait_s > 0 and limits == caller.limits:  # else the file has changed
            raise _used_up(caller, wait_s)

    async def admit(self, caller: Caller, num_prompt_tokens: int, *, has_begun: bool = False) -> None:
        """Raises Overloaded, with the time to come back, for a tenant that has used up what it may."""
        if not _is_limited(caller):
            return
        assert caller.tenant is not None
        wait_s = await self._charge(
            caller.tenant, caller.limits, 1, num_prompt_tokens, BEGUN if has_begun else NEW
        )
        if wait_s > 0:
            if not has_begun:
                self._closed[caller.tenant] = caller.limits, self._now_s() + wait_s
            raise _used_up(caller, wait_s)

    def owe(self, caller: Caller, num_output_tokens: int) -> None:
        """So much more output was made for it; that is charged soon."""
        if _is_limited(caller) and num_output_tokens and caller.limits.tokens_per_minute:
            assert caller.tenant is not None
            _, owed = self._owed.get(caller.tenant, (caller.limits, 0))
            self._owed[caller.tenant] = caller.limits, owed + num_output_tokens
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._charge_soon(), name="rate limits")

    async def charge_outputs(self) -> None:
        """What is owed now."""
        while self._owed:
            tenant, (limits, num_tokens) = self._owed.popitem()
            await self._charge(tenant, limits, 0, num_tokens, CERTAIN)

    async def _charge(
        self, tenant: str, limits: TenantLimits, requests: int, tokens: int, minutes_owed_max: float
    ) -> float:
        now_s = self._now_s()
        bucket = self._buckets.setdefault(tenant, Bucket.full(limits, now_s))
        if self._registry is not None and self._script is not None and self._now_s() >= self._away_until_s:
            arguments = [limits.requests_per_minute or 0, limits.tokens_per_minute or 0, requests, tokens]
            key = f"or:limits:{tenant_digest(tenant)}"
            try:
                answer = await self._registry.ask(
                    self._script(keys=[key], args=[*arguments, minutes_owed_max])
                )
                if answer == 0:
                    bucket.charge(limits, now_s, requests, tokens, CERTAIN)
                return float(answer) / 1e3
            except RegistryUnavailable as error:
                self._away_until_s = self._now_s() + _AWAY_S
                _log.warning("this replica keeps to tenants' limits by itself: %s", error.message)
        return bucket.charge(limits, self._now_s(), requests, tokens, minutes_owed_max)

    async def _charge_soon(self) -> None:
        while self._owed:
            await asyncio.sleep(_FLUSH_S)
            await self.charge_outputs()


def _refilled(left: float, limit: float | None, elapsed_s: float) -> float:
    """What is left after so much time."""
    return 0.0 if limit is None else min(limit, left + elapsed_s * limit / MINUTE_S)


def _wait_s(left: float, limit: float | None, minutes_owed_max: float) -> float:
    """Until there is one."""
    return 0.0 if limit is None else max(1 - left - minutes_owed_max * limit, 0.0) * MINUTE_S / limit


def _used_up(caller: Caller, wait_s: float) -> Overloaded:
    limits = caller.limits
    told = [f"{limits.requests_per_minute:g} requests"] if limits.requests_per_minute else []
    told += [f"{limits.tokens_per_minute:g} tokens"] if limits.tokens_per_minute else []
    return Overloaded(
        f"tenant {caller.tenant} has used up its {' or '.join(told)} a minute; it may go on in {wait_s:.1f} s",
        wait_s,
    )


def _is_limited(caller: Caller) -> bool:
    limits = caller.limits
    return limits.requests_per_minute is not None or limits.tokens_per_minute is not None
