"""Exchange of speculation priors between replicas through Redis, every few seconds and beside the requests.

    {or:priors}:values   hash: name of a key → "time judged paused steps decided accepted", sums faded to that time
    {or:priors}:times    the same names, by the time of their last change

One script adds a replica's evidence, drops what is old or too much, and returns everything faded to now. It uses the
server's clock, so the replicas' clocks do not matter, and adding commutes. Names and numbers are those of
`coordinator.speculation.priors`: no prompt, no name of a tenant.

Redis is not on the critical path. A replica that cannot reach it relies on its own evidence and keeps it, within the
table's bounds. After a lost answer a batch may count twice, which changes a share a little and no token.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Final, Self, cast

from coordinator.speculation.priors import HALF_LIFE_S, KEYS_MAX, Evidence, PriorKey, PriorTable
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import RegistryUnavailable
from outrider.registry.registry import Registry

_log = logging.getLogger(__name__)

SYNC_S: Final = 3.0
LIFE_S: Final = 8 * HALF_LIFE_S
"""A key without changes for so long has no evidence left that counts."""
_VALUES_KEY: Final = "{or:priors}:values"
_TIMES_KEY: Final = "{or:priors}:times"

# KEYS: values, times. ARGV: half-life in s, life in s, most keys; then of each key its name, judged, paused, steps,
# decided, accepted. Returns name and "judged paused steps decided accepted" of every key then.
_EXCHANGE: Final = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local half_life, life, keys_max = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local function faded(text)
  local counts = {}
  for each in string.gmatch(text or '', '%S+') do counts[#counts + 1] = tonumber(each) end
  if #counts ~= 6 then return {0, 0, 0, 0, 0} end
  local share = 0.5 ^ (math.max(now - table.remove(counts, 1), 0) / half_life)
  for i = 1, 5 do counts[i] = counts[i] * share end
  return counts
end
for at = 4, #ARGV, 6 do
  local counts = faded(redis.call('HGET', KEYS[1], ARGV[at]))
  for i = 1, 5 do counts[i] = counts[i] + tonumber(ARGV[at + i]) end
  redis.call('HSET', KEYS[1], ARGV[at], string.format('%.3f %.9g %.9g %.9g %.9g %.9g', now, unpack(counts)))
  redis.call('ZADD', KEYS[2], string.format('%.6f', now), ARGV[at])
end
local function drop(names)
  for _, name in ipairs(names) do
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
  end
end
drop(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.3f', now - life)))
local num_excess = redis.call('ZCARD', KEYS[2]) - keys_max
if num_excess > 0 then drop(redis.call('ZRANGE', KEYS[2], 0, num_excess - 1)) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.floor(life * 1000)) end
local found, stored = {}, redis.call('HGETALL', KEYS[1])
for at = 1, #stored, 2 do
  found[#found + 1] = stored[at]
  found[#found + 1] = string.format('%.9g %.9g %.9g %.9g %.9g', unpack(faded(stored[at + 1])))
end
return found
"""


class PriorStore:
    """Synchronizes a replica's table with the others' while the context is open.

    Entering does not wait for Redis: until the first answer, requests start as if nothing were known.
    """

    def __init__(
        self, registry: Registry, table: PriorTable, now_s: Callable[[], float], sync_s: float = SYNC_S
    ) -> None:
        """`now_s` is the table's clock."""
        self._registry = registry
        self._exchange = registry.register_script(_EXCHANGE)
        self._table = table
        self._now_s = now_s
        self._sync_s = sync_s
        self._task: asyncio.Task[None] | None = None
        self.is_degraded = False  # the last attempt failed

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(keep_going(self._keep, "the exchange of priors"), name="priors")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)
        if not self.is_degraded:
            await self.sync()  # a leaving replica passes on its evidence

    async def sync(self) -> bool:
        """Exchanges evidence once. False if Redis does not answer; then nothing is lost, and nothing raises."""
        sent = self._table.take(self._now_s())
        arguments: list[str | float] = [HALF_LIFE_S, LIFE_S, KEYS_MAX]
        for key, evidence in sent.items():
            arguments += [str(key), *evidence]
        has_arrived = False
        try:
            answer = await self._registry.ask(self._exchange(keys=[_VALUES_KEY, _TIMES_KEY], args=arguments))
            has_arrived = True
        except RegistryUnavailable as error:
            if not self.is_degraded:
                _log.warning("using the priors known so far: %s", error.message)
            self.is_degraded = True
            return False
        finally:
            if not has_arrived:  # also after a cancellation
                self._table.give_back(self._now_s())
        self.is_degraded = False
        self._table.learn(_read(cast("list[str]", answer)), self._now_s())
        return True

    async def _keep(self) -> None:
        while True:
            await self.sync()
            # Replicas that started together spread out.
            await asyncio.sleep(self._sync_s * random.uniform(0.75, 1.25))


def _read(answer: Iterable[str]) -> dict[PriorKey, Evidence]:
    rows = iter(answer)
    found: dict[PriorKey, Evidence] = {}
    for name, counts in zip(rows, rows, strict=True):
        try:
            found[PriorKey.parse(name)] = Evidence(*map(float, counts.split()))
        except (ValueError, TypeError) as error:  # perhaps of another release
            _log.warning("ignoring the prior %r: %s", name, error)
    return found
