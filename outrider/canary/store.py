"""Storage of the canary in Redis, shared by the coordinator's replicas and `outrider canary`. There is at most one.

{or:canary}:plan      hash: id, plan (JSON), state, begins_ms, ends_ms, reason; stays until it is forgotten
{or:canary}:control   hash: sums over the requests of this arm (`outrider.canary.statistics`), by their names;
                      those that another release has under other names add up beside these
{or:canary}:canary    hash: the same of the other arm
{or:canary}:batches   hash: of each replica the number of its last batch; these three last a week beyond it

Times are milliseconds of Redis' clock. A state changes only from the one that the caller has seen. A batch is counted
once, however often it is sent, and only for the canary that it names. A sum whose name begins with FIRST is in one
arm's hash alone; control's is the first where both come in one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from outrider.canary.plan import LEAD_MS, ArmName, Canary, CanaryPlan, CanaryState
from outrider.canary.statistics import FIRST, ArmStatistics
from outrider.errors import ConfigurationError
from outrider.registry.redis_connection import CLOCK_LUA
from outrider.registry.registry import Registry

_log = logging.getLogger(__name__)

STATISTICS_LIFE_S: Final = 7 * 86400.0
_PLAN: Final = "{or:canary}:plan"
_ARMS: Final[Mapping[ArmName, str]] = {arm: f"{{or:canary}}:{arm}" for arm in ArmName}
_BATCHES: Final = "{or:canary}:batches"
_KEYS: Final = [_PLAN, _ARMS[ArmName.CONTROL], _ARMS[ArmName.CANARY], _BATCHES]


# KEYS: all. ARGV: id, plan, state, lead in ms, duration in ms. Without a lead it waits. Returns the id of a canary that
# is in the way because it runs, waits or is promoted, else an empty string.
_BEGIN: Final = f"""{CLOCK_LUA}
local id, state, ends = unpack(redis.call('HMGET', KEYS[1], 'id', 'state', 'ends_ms'))
if id and state ~= 'aborted' and (state == 'promoted' or now < tonumber(ends)) then return id end
redis.call('DEL', unpack(KEYS))
local begins = 0
if ARGV[3] == 'running' then begins = now + ARGV[4] end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'plan', ARGV[2], 'state', ARGV[3], 'reason', '',
  'begins_ms', string.format('%d', begins), 'ends_ms', string.format('%d', math.max(begins, now) + ARGV[5]))
return ''
"""

# KEYS: plan. ARGV: id, state before, state after, reason, lead in ms, duration in ms. One that waited begins: both of
# its times are set anew. Returns 1 when it was in that state.
_DECIDE: Final = f"""{CLOCK_LUA}
local id, state = unpack(redis.call('HMGET', KEYS[1], 'id', 'state'))
if id ~= ARGV[1] or state ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'reason', ARGV[4])
if ARGV[2] == 'waiting' and ARGV[3] == 'running' then
  redis.call('HSET', KEYS[1], 'begins_ms', string.format('%d', now + ARGV[5]),
    'ends_ms', string.format('%d', now + ARGV[5] + ARGV[6]))
end
return 1
"""

# KEYS: all. ARGV: life in ms; with a batch also its id, sender and number, how many sums are of control, and names and
# values, control's first. Returns the time in ms and the three hashes as flat lists.
_EXCHANGE: Final = f"""{CLOCK_LUA}
if #ARGV > 1 and redis.call('HGET', KEYS[1], 'id') == ARGV[2]
    and tonumber(ARGV[4]) > tonumber(redis.call('HGET', KEYS[4], ARGV[3]) or 0) then
  local last_of_control = 5 + 2 * ARGV[5]
  for at = 6, #ARGV, 2 do
    local key, other = KEYS[3], KEYS[2]
    if at < last_of_control then key, other = other, key end
    local is_taken = string.sub(ARGV[at], 1, {len(FIRST)}) == '{FIRST}'
      and redis.call('HEXISTS', other, ARGV[at]) == 1
    if not is_taken then redis.call('HINCRBYFLOAT', key, ARGV[at], ARGV[at + 1]) end
  end
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
  for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
end
return {{now, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}}
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """One replica's sums since its last batch. Numbers of a sender grow from 1."""

    canary_id: str
    sender: str
    number: int
    sums: Mapping[ArmName, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The canary and the statistics of all replicas together, at one time."""

    clock_ms: int  # of Redis
    canary: Canary | None = None
    arms: Mapping[ArmName, ArmStatistics] = field(default_factory=lambda: {arm: ArmStatistics() for arm in ArmName})


class CanaryStore:
    """Reads and writes the canary. Calls raise RegistryUnavailable where Redis does not answer."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._begin = registry.register_script(_BEGIN)
        self._decide = registry.register_script(_DECIDE)
        self._exchange = registry.register_script(_EXCHANGE)
        self._ignored: dict[str, str] = {}  # what could not be read -> id of the last such canary

    async def begin(self, plan: CanaryPlan) -> None:
        """Starts a canary, LEAD_MS from now, or as soon as there is a draft worker of the model it names. Raises
        ConfigurationError while another one is in force."""
        state = CanaryState.WAITING if plan.change.draft_model else CanaryState.RUNNING
        duration_ms = round(plan.duration_s * 1000)
        # Replicas of a release that knows no models can follow a canary that names none.
        described = plan.model_dump_json(exclude=None if plan.model else {"model"})
        arguments: list[str | float] = [plan.canary_id, described, state, LEAD_MS, duration_ms]
        other = await self._registry.ask(self._begin(keys=_KEYS, args=arguments))
        if other:
            raise ConfigurationError(f"the canary {other} is in force; end it first, with `outrider canary abort`")

    async def decide(self, canary: Canary, state: CanaryState, reason: str) -> bool:
        """Moves a canary from its current state to another. False when its state had changed meanwhile."""
        plan = canary.plan
        duration_ms = round(plan.duration_s * 1000)
        arguments: list[str | float] = [plan.canary_id, canary.state, state, reason, LEAD_MS, duration_ms]
        return bool(await self._registry.ask(self._decide(keys=[_PLAN], args=arguments)))

    async def exchange(self, batch: Batch | None = None) -> CanaryView:
        """Sends a replica's batch, if any, and returns the sums of all."""
        arguments: list[str | float] = [round(STATISTICS_LIFE_S * 1000)]
        if batch is not None:
            sums = [batch.sums.get(arm, {}) for arm in (ArmName.CONTROL, ArmName.CANARY)]
            arguments += [batch.canary_id, batch.sender, batch.number, len(sums[0])]
            arguments += [part for each in sums for pair in each.items() for part in pair]
        answer = await self._registry.ask(self._exchange(keys=_KEYS, args=arguments))
        clock_ms, stored, *arms = cast("list[Any]", answer)
        plan = _paired(stored)
        return CanaryView(
            clock_ms,
            self._read_canary(plan),
            {arm: ArmStatistics(self._read_sums(plan, _paired(each))) for arm, each in zip(ArmName, arms, strict=True)},
        )

    async def forget(self) -> None:
        """Removes the canary; draft workers that were reserved for it serve all requests again."""
        await self._registry.delete(_KEYS)

    def _read_canary(self, stored: Mapping[str, str]) -> Canary | None:
        if not stored:
            return None
        try:
            return Canary(
                CanaryPlan.model_validate_json(stored["plan"]),
                CanaryState(stored["state"]),
                int(stored["begins_ms"]),
                int(stored["ends_ms"]),
                stored["reason"],
            )
        except (KeyError, ValueError) as error:  # perhaps of another release; ValidationError is a ValueError
            self._ignore("plan", stored, error)
            return None

    def _read_sums(self, plan: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, float]:
        try:
            return {name: float(value) for name, value in stored.items()}
        except ValueError as error:  # not ours; ignored
            self._ignore("statistics", plan, error)
            return {}

    def _ignore(self, what: str, plan: Mapping[str, str], error: Exception) -> None:
        """Logs it once, although it is read every few seconds."""
        canary_id = plan.get("id", "")
        if self._ignored.get(what) != canary_id:
            _log.warning("ignoring the %s of the canary %s: %s", what, canary_id, error)
            self._ignored[what] = canary_id


def _paired(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
