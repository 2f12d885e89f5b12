"""Lua scripts of batches in Redis: each is one atomic change of the keys that `line_journal` and `files` list."""

from __future__ import annotations

from typing import Final

from outrider.registry.redis_connection import CLOCK_LUA

_RANK_LUA: Final = """
local function rank(open, active)
  for i, id in ipairs(redis.call('ZRANGE', open, 0, -1)) do
    local created = redis.call('ZSCORE', active, id)
    if created then redis.call('ZADD', active, (i - 1) * 1e13 + created % 1e13, id) end
  end
end
"""
# `rank` orders active batches by their number among their tenant's open ones, then by their creation: 1e13 is later
# than any time in ms. So each tenant's first one goes before anybody's second.

# KEYS: batch, the tenant's batches, its open ones, active ones. ARGV: id, life of the record in ms, most open ones,
# most of the tenant's batches that are kept, then field, value, ... Forgets the oldest ones beyond these that are over.
# Returns 1, or 0 if the tenant has too many open batches.
CREATE: Final = f"""{CLOCK_LUA}{_RANK_LUA}
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if redis.call('ZSCORE', KEYS[3], ARGV[1]) then return 1 end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[3], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[4], now, ARGV[1])
rank(KEYS[3], KEYS[4])
local excess = redis.call('ZCARD', KEYS[2]) - ARGV[4]
if excess > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, excess + ARGV[3] - 1)) do
    if excess > 0 and not redis.call('ZSCORE', KEYS[3], id) then
      redis.call('DEL', '{{or:batch:' .. id .. '}}:batch')
      redis.call('ZREM', KEYS[2], id)
      excess = excess - 1
    end
  end
end
return 1
"""

# KEYS: batch. ARGV: fence or '', the new state, the number of states before it, these, then field, value, ... Returns
# the new state if the batch has it now, 'fenced' if another process has the task, else the state that it stays in.
MOVE: Final = f"""{CLOCK_LUA}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'gone' end
if state == ARGV[2] then return state end
local permitted = false
for i = 4, 3 + ARGV[3] do permitted = permitted or ARGV[i] == state end
if not permitted then return state end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'task') ~= ARGV[1] then return 'fenced' end
redis.call('HSET', KEYS[1], 'state', ARGV[2], ARGV[2] .. '_at', math.floor(now / 1000), unpack(ARGV, 4 + ARGV[3]))
redis.call('HDEL', KEYS[1], 'task', 'task_until')
return ARGV[2]
"""

# KEYS: batch. ARGV: fence, life in ms, the state that the task is for. Takes or renews the batch's task; returns 1, or
# 0 if another process has it, or the batch has another state.
TAKE_TASK: Final = f"""{CLOCK_LUA}
if redis.call('HGET', KEYS[1], 'state') ~= ARGV[3] then return 0 end
local holder = redis.call('HGET', KEYS[1], 'task')
if holder and holder ~= ARGV[1] and tonumber(redis.call('HGET', KEYS[1], 'task_until') or 0) > now then return 0 end
redis.call('HSET', KEYS[1], 'task', ARGV[1], 'task_until', now + ARGV[2])
return 1
"""

# KEYS: batch, leases, owners, attempts. ARGV: fence, life in ms, most lines, the record's life in ms. Lines whose lease
# has ended go first. Returns line, number of attempts, ...
CLAIM: Final = f"""{CLOCK_LUA}
if redis.call('HGET', KEYS[1], 'state') ~= 'in_progress' then return {{}} end
local found = {{}}
local function take(line)
  redis.call('ZADD', KEYS[2], now + ARGV[2], line)
  redis.call('HSET', KEYS[3], line, ARGV[1])
  found[#found + 1] = tostring(line)
  found[#found + 1] = redis.call('HINCRBY', KEYS[4], line, 1)
end
for _, line in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[3])) do take(line) end
local next = tonumber(redis.call('HGET', KEYS[1], 'next') or 0)
local total = tonumber(redis.call('HGET', KEYS[1], 'num_lines'))
while #found < 2 * ARGV[3] and next < total do
  take(next)
  next = next + 1
end
redis.call('HSET', KEYS[1], 'next', next)
for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return found
"""

# KEYS: batch, leases, owners. ARGV: life in ms, then line, fence, ... Returns the lines that are somebody else's now.
RENEW: Final = f"""{CLOCK_LUA}
local lost = {{}}
local runs = redis.call('HGET', KEYS[1], 'state') == 'in_progress'
for i = 2, #ARGV, 2 do
  if runs and redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[i + 1] then
    redis.call('ZADD', KEYS[2], now + ARGV[1], ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
"""

# KEYS: batch, leases, owners, attempts, parts. ARGV: name of a part, the record's life in ms, how many sums of the
# batch it adds to, then sum, number, ..., then line, fence, ... The part is taken as a whole: returns nothing then, and
# if it had been taken before. Otherwise nothing changes, and the lines that are somebody else's now are returned.
COMMIT: Final = """
if redis.call('LPOS', KEYS[5], ARGV[1]) then return {} end
local lost = {}
local runs = redis.call('HGET', KEYS[1], 'state') == 'in_progress'
local first = 4 + 2 * ARGV[3]
for i = first, #ARGV, 2 do
  if not runs or redis.call('HGET', KEYS[3], ARGV[i]) ~= ARGV[i + 1] then lost[#lost + 1] = ARGV[i] end
end
if #lost > 0 then return lost end
for i = first, #ARGV, 2 do
  redis.call('ZREM', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i])
  redis.call('HDEL', KEYS[4], ARGV[i])
end
redis.call('RPUSH', KEYS[5], ARGV[1])
redis.call('PEXPIRE', KEYS[5], ARGV[2])
for i = 4, first - 1, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
return {}
"""

# KEYS: leases, owners, attempts. ARGV: line, fence, ... Gives lines back that have not ended; these attempts do not
# count.
RELEASE: Final = """
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    redis.call('ZADD', KEYS[1], 0, ARGV[i])
    redis.call('HSET', KEYS[2], ARGV[i], '')
    redis.call('HINCRBY', KEYS[3], ARGV[i], -1)
  end
end
return 1
"""

# KEYS: batch, leases, owners. Ends every lease; the state is one in which none begins. Returns the lines that were
# claimed and have not ended, now or at an earlier call.
CLOSE: Final = """
local open = redis.call('HKEYS', KEYS[3])
for _, line in ipairs(open) do redis.call('HSET', KEYS[3], line, 'closed') end
redis.call('DEL', KEYS[2])
return open
"""

# KEYS: batch, active ones, the tenant's open ones, leases, owners, attempts, parts. ARGV: id. Removes what only a batch
# that runs needs.
RETIRE: Final = f"""{_RANK_LUA}
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
rank(KEYS[3], KEYS[2])
redis.call('DEL', KEYS[4], KEYS[5], KEYS[6], KEYS[7])
return 1
"""

# KEYS: a hash, and optionally another key of its parts. Returns its fields and values.
READ: Final = "return redis.call('HGETALL', KEYS[1])"
# KEYS: a list. Returns all of it.
READ_LIST: Final = "return redis.call('LRANGE', KEYS[1], 0, -1)"
# KEYS: a sorted set. ARGV: the most members. Returns the first ones.
FIRST: Final = "return redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1)"
# KEYS: a sorted set. ARGV: a member after which to begin or '', the most members, 1 for the oldest first. Returns
# members, or false if there is no such member.
PAGE: Final = """
local rank, range = 'ZREVRANK', 'ZREVRANGE'
if ARGV[3] == '1' then rank, range = 'ZRANK', 'ZRANGE' end
local first = 0
if ARGV[1] ~= '' then
  first = redis.call(rank, KEYS[1], ARGV[1])
  if not first then return false end
  first = first + 1
end
return redis.call(range, KEYS[1], first, first + ARGV[2] - 1)
"""

# KEYS: what is stored. ARGV: name, when it is to be deleted in ms since 1970.
ANNOUNCE: Final = "return redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])"
# KEYS: what is stored. ARGV: name.
FORGET: Final = "return redis.call('ZREM', KEYS[1], ARGV[1])"
# KEYS: what is stored. ARGV: the most names. Returns the names of what is to be deleted by now.
DUE: Final = f"{CLOCK_LUA}return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])"

# KEYS: file, the tenant's files, their sizes. ARGV: id, end of its life in ms since 1970, its bytes, most files, most
# bytes, then field, value, ... A tenant's files are counted by what is there. Returns what is full, 'files' or 'bytes',
# else '', and what was recorded of this file before, or ''.
ADD_FILE: Final = f"""{CLOCK_LUA}
local sum, known = 0, redis.call('HGETALL', KEYS[3])
for i = 1, #known, 2 do
  local size, life = string.match(known[i + 1], '(%d+) (%d+)')
  if tonumber(life) <= now then
    redis.call('ZREM', KEYS[2], known[i])
    redis.call('HDEL', KEYS[3], known[i])
  elseif known[i] ~= ARGV[1] then
    sum = sum + size
  end
end
local others = redis.call('ZCARD', KEYS[2])
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then others = others - 1 end
if others >= tonumber(ARGV[4]) then return {{'files', ''}} end
if sum + ARGV[3] > tonumber(ARGV[5]) then return {{'bytes', ''}} end
local earlier = redis.call('HGET', KEYS[1], 'about') or ''
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('PEXPIREAT', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3] .. ' ' .. ARGV[2])
return {{'', earlier}}
"""
# KEYS: file, the tenant's files, their sizes. ARGV: id. Returns how many there were.
DROP_FILE: Final = """
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
