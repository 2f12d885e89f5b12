"""Limits requests and tokens per minute and tenant with buckets in Redis, shared by all coordinators.

    or:limits:TENANT   hash: requests and tokens left at a time of Redis' clock; expires when it would be full

A bucket has one minute's allowance and fills steadily. A request is admitted while both buckets of its tenant have at
least 1 left. It pays for itself on arrival, before any work, so that one that is refused has paid, too; for its prompt
as soon as its length is known, and for its output as that is generated, shown or not: a bucket may go negative, so no
output length has to be guessed. A resumed stream pays too, but is admitted while its tenant owes less than another
minute's allowance. So the first refusal does not end it, and it cannot resume forever.

Without Redis each coordinator applies the limits to the requests it admitted itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from coordinator.access.api_keys import Caller, TenantLimits
from outrider.concurrency.background import end_tasks
from outrider.errors import Overloaded, RegistryUnavailable
from outrider.registry.redis_connection import CLOCK_LUA
from outrider.registry.registry import Registry
from outrider.security.tenants import tenant_digest

_log = logging.getLogger(__name__)

MINUTE_S: Final = 60.0
NEW: Final = 0.0
BEGUN: Final = 1.0
CERTAIN: Final = 1e9
"""Minutes of allowance that a tenant may owe and still be admitted: for a new request, for a resumed one, and for usage
that has already happened."""
_AWAY_S: Final = 2.0  # how long Redis is not asked after it has not answered
_FLUSH_S: Final = 0.5  # how long output gathers before it is charged

# KEYS: a tenant's bucket. ARGV: requests and tokens per minute (0: no limit), their cost, and the minutes of
# allowance that may be owed. Returns the time until admission in ms; 0 if it was admitted and charged. A request that
# has been counted before, and costs tokens only, needs none left, but must not be owed either.
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
    local needed = 1
    if i == 1 and tonumber(ARGV[3]) == 0 then needed = 0 end
    local missing = needed - now_left - ARGV[5] * limit
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
    """The allowance a tenant has left, computed like `_CHARGE`. Pure."""

    at_s: float
    requests: float
    tokens: float

    @classmethod
    def full(cls, limits: TenantLimits, now_s: float) -> Self:
        """A bucket of a tenant that has used nothing."""
        return cls(now_s, limits.requests_per_minute or 0.0, limits.tokens_per_minute or 0.0)

    def charge(
        self,
        limits: TenantLimits,
        now_s: float,
        requests: float,
        tokens: float,
        minutes_owed_max: float = NEW,
    ) -> float:
        """Charges a request if it is admitted. Returns 0 then, else the seconds until it would be."""
        elapsed_s, self.at_s = max(now_s - self.at_s, 0.0), now_s
        self.requests = _refilled(self.requests, limits.requests_per_minute, elapsed_s)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, elapsed_s)
        wait_s = max(
            _wait_s(min(requests, 1), self.requests, limits.requests_per_minute, minutes_owed_max),
            _wait_s(1, self.tokens, limits.tokens_per_minute, minutes_owed_max),
        )
        if wait_s > 0:
            return wait_s
        self.requests -= requests
        self.tokens -= tokens
        return 0.0


class RateLimits:
    """Rate limits at one replica; output is charged while the context is open."""

    def __init__(self, registry: Registry | None, now_s: Callable[[], float]) -> None:
        """`registry` answers quickly or counts as unavailable; None: this is the only replica."""
        self._registry = registry
        self._now_s = now_s
        self._script = None if registry is None else registry.register_script(_CHARGE)
        # All by tenant; the file of keys bounds their number.
        self._buckets: dict[str, Bucket] = {}  # used without Redis
        self._closed: dict[str, tuple[TenantLimits, float]] = {}  # limits, and until when they refuse
        self._owed: dict[str, tuple[TenantLimits, int]] = {}  # limits, and output tokens to be charged
        self._away_until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        await self.charge_outputs()

    def check(self, caller: Caller) -> None:
        """Refuses a new request of a recently refused tenant before any work. Raises Overloaded."""
        limits, until_s = self._closed.get(caller.tenant or "", (None, 0.0))
        wait_s = until_s - self._now_s()
        if wait_s > 0 and limits == caller.limits:  # else the key file changed them
            raise _used_up(caller, wait_s)

    async def admit(self, caller: Caller, num_prompt_tokens: int = 0, *, has_begun: bool = False) -> None:
        """Charges a request on its arrival. Raises Overloaded with the time to retry if the allowance is used up."""
        await self._admit(caller, 1, num_prompt_tokens, has_begun=has_begun)

    async def charge_prompt(self, caller: Caller, num_prompt_tokens: int, *, has_begun: bool = False) -> None:
        """Charges the prompt of an admitted request. Raises as `admit`: its tenant's other requests may have used up
        the allowance meanwhile."""
        await self._admit(caller, 0, num_prompt_tokens, has_begun=has_begun)

    async def _admit(self, caller: Caller, requests: int, num_prompt_tokens: int, *, has_begun: bool) -> None:
        if not _is_limited(caller):
            return
        assert caller.tenant is not None
        owed_max = BEGUN if has_begun else NEW
        wait_s = await self._charge(caller.tenant, caller.limits, requests, num_prompt_tokens, owed_max)
        if wait_s > 0:
            if not has_begun:
                self._closed[caller.tenant] = caller.limits, self._now_s() + wait_s
            raise _used_up(caller, wait_s)

    def owe(self, caller: Caller, num_output_tokens: int) -> None:
        """Records generated output, which is charged within `_FLUSH_S`."""
        if _is_limited(caller) and num_output_tokens and caller.limits.tokens_per_minute:
            assert caller.tenant is not None
            _, owed = self._owed.get(caller.tenant, (caller.limits, 0))
            self._owed[caller.tenant] = caller.limits, owed + num_output_tokens
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._charge_soon(), name="rate limits")

    async def charge_outputs(self) -> None:
        """Charges all output recorded so far."""
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
                answer = await self._registry.ask(self._script(keys=[key], args=[*arguments, minutes_owed_max]))
                if answer == 0:
                    bucket.charge(limits, now_s, requests, tokens, CERTAIN)
                return float(answer) / 1e3
            except RegistryUnavailable as error:
                self._away_until_s = self._now_s() + _AWAY_S
                _log.warning("this replica applies tenants' limits by itself: %s", error.message)
        return bucket.charge(limits, self._now_s(), requests, tokens, minutes_owed_max)

    async def _charge_soon(self) -> None:
        while self._owed:
            await asyncio.sleep(_FLUSH_S)
            await self.charge_outputs()


def _refilled(left: float, limit: float | None, elapsed_s: float) -> float:
    """Returns the allowance after a time of refilling."""
    return 0.0 if limit is None else min(limit, left + elapsed_s * limit / MINUTE_S)


def _wait_s(needed: float, left: float, limit: float | None, minutes_owed_max: float) -> float:
    """Returns the seconds until as many requests or tokens are available."""
    return 0.0 if limit is None else max(needed - left - minutes_owed_max * limit, 0.0) * MINUTE_S / limit


def _used_up(caller: Caller, wait_s: float) -> Overloaded:
    limits = caller.limits
    allowances = [f"{limits.requests_per_minute:g} requests"] if limits.requests_per_minute else []
    allowances += [f"{limits.tokens_per_minute:g} tokens"] if limits.tokens_per_minute else []
    return Overloaded(
        f"tenant {caller.tenant} has used up its {' or '.join(allowances)} a minute; it may go on in {wait_s:.1f} s",
        wait_s,
    )


def _is_limited(caller: Caller) -> bool:
    limits = caller.limits
    return limits.requests_per_minute is not None or limits.tokens_per_minute is not None
