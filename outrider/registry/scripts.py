"""Lua scripts of the registry, for coordinators: each is one atomic change of the keys that `registry` lists.

Workers may run none; their calls are in `own_lease`.
"""

from __future__ import annotations

from typing import Final

from outrider.registry.redis_connection import CLOCK_LUA

_NOW: Final = f"""{CLOCK_LUA}local function tell(stream, kind, id, incarnation)
  redis.call('XADD', stream, 'MAXLEN', '~', 1000, '*', 'kind', kind, 'worker_id', id, 'incarnation', incarnation)
end
"""

# KEYS: leases, events. ARGV: the pool's prefix, then the most workers whose lease has ended that are dropped, the most
# live ones that are read, those whose lease ends last, and the most fields of a record: whoever has a worker's password
# can write any number of each, and nobody else is answered while a script runs. Returns the time in ms, the id of the
# last event and its kind, then for each live worker its id, the number of its reservations and a flat field-value list.
READ: Final = f"""{_NOW}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  redis.call('ZREM', KEYS[1], id)
  local incarnation = redis.call('HGET', ARGV[1] .. 'w:' .. id, 'incarnation')
  redis.call('DEL', ARGV[1] .. 'w:' .. id)
  tell(KEYS[2], 'expired', id, incarnation or '')
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local found = {{now, last[1] and last[1][1] or '0-0', last[1] and last[1][2][2] or ''}}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', '(' .. now, 'LIMIT', 0, ARGV[3])) do
  local key = ARGV[1] .. 'w:' .. id
  local record = redis.call('HLEN', key) <= tonumber(ARGV[4]) and redis.call('HGETALL', key) or {{}}
  if #record > 0 then
    local incarnation = redis.call('HGET', ARGV[1] .. 'w:' .. id, 'incarnation') or ''
    found[#found + 1] = id
    found[#found + 1] = redis.call('ZCOUNT', ARGV[1] .. 'r:' .. incarnation, '(' .. now, '+inf')
    found[#found + 1] = record
  end
end
return found
"""

# KEYS: reservations of workers, the preferred one first. ARGV: caller's token, life in ms, then each worker's limit.
# Returns the number of the first one that has room, which is then reserved; 0 when none has.
RESERVE: Final = f"""{_NOW}
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if redis.call('ZSCORE', key, ARGV[1]) or redis.call('ZCARD', key) < tonumber(ARGV[2 + i]) then
    redis.call('ZADD', key, now + ARGV[2], ARGV[1])
    redis.call('PEXPIRE', key, 2 * ARGV[2])
    return i
  end
end
return 0
"""

# KEYS: reservations of one worker. ARGV: life in ms, then tokens, which are added if missing: their sessions run.
RENEW: Final = f"""{_NOW}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
return 1
"""

# KEYS: a stream's journal. ARGV: its writer's replica and number there, life in ms, then how many ms ago the writer
# began or nothing, then field, value, ... With the time these are all fields: they replace the journal, or it returns 0
# where another writer has begun since. Without it they are added, or it returns 0 for another writer's journal, 2 for
# none.
WRITE_JOURNAL: Final = f"""{_NOW}
local replica, number, begun = unpack(redis.call('HMGET', KEYS[1], 'replica', 'number', 'begun_ms'))
if ARGV[4] ~= '' then
  local mine = now - ARGV[4]
  if replica == ARGV[1] then
    if tonumber(number) > tonumber(ARGV[2]) then return 0 end
  -- Not later than now: the clock may have been set back.
  elseif replica and math.min(tonumber(begun or 0) or 0, now) > mine then return 0 end
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'replica', ARGV[1], 'number', ARGV[2], 'begun_ms', string.format('%.0f', mine))
elseif not replica then return 2
elseif replica ~= ARGV[1] or number ~= ARGV[2] then return 0 end
if #ARGV > 4 then redis.call('HSET', KEYS[1], unpack(ARGV, 5)) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# KEYS: losses. ARGV: life of a fact in ms, the most facts, how many of those that follow keep the time at which they
# were first told, facts. Returns now, and fact, time, ...
EXCHANGE_LOSSES: Final = f"""{_NOW}
local said = redis.call('HGETALL', KEYS[1])
for i = 1, #said, 2 do
  local at = tonumber(said[i + 1])
  if not at or math.abs(now - at) > tonumber(ARGV[1]) then redis.call('HDEL', KEYS[1], said[i]) end
end
local moment = string.format('%.0f', now)
for i = 4, #ARGV do
  local is_once = i < 4 + ARGV[3]
  local has_room = redis.call('HLEN', KEYS[1]) < ARGV[2] * (is_once and 1 or 2)
  local is_known = redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1
  if is_known and not is_once or not is_known and has_room then redis.call('HSET', KEYS[1], ARGV[i], moment) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {{moment, redis.call('HGETALL', KEYS[1])}}
"""
