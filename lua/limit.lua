-- limit: sets or removes the limits of keys.
-- Guarantee: in the topic's own shard, each change has a number, higher than those before. Other shards have
-- copies: `open` begins the copy of a change, and `close` ends it. A shard that knows of a later change takes
-- no further part of an earlier one. A repeated call returns the first answer.
-- KEYS  the prelude's, the topic's limits, the call's record
-- ARGV  set (in the topic's own shard), open, copy or close; the number of the change (0 to set); n;
--       n each of the field (a key, or a group, <US> and a key), its limits ('' to remove them)
-- Returns {'OK', keys whose limits changed, or -1 if the shard knows of a later change}
local before = answered()
if before then return before end

local LIMITS, what = KEYS[ID_KEYS + 1], ARGV[ARGS + 1]
local number, n, first = tonumber(ARGV[ARGS + 2]), tonumber(ARGV[ARGS + 3]), ARGS + 3
local latest = tonumber(string.match(call('HGET', OPTIONS, 'limits') or '0', '^%d+'))
if what ~= 'set' and latest > number or (what == 'copy' or what == 'close') and latest < number then
  return {'OK', -1}
end

allow_writes_at_maxmemory()
local changes = 0
for i = 1, n do
  local name, limits = ARGV[first + i], ARGV[first + n + i]
  if (call('HGET', LIMITS, name) or '') ~= limits then
    if limits ~= '' then call('HSET', LIMITS, name, limits) else call('HDEL', LIMITS, name) end
    changes = changes + 1
  end
end
if what == 'set' then number = math.max(latest + 1, (clock())) end
if what ~= 'set' or changes > 0 then
  call('HSET', OPTIONS, 'limits', int(number) .. ((what == 'open' or what == 'copy') and '+' or ''))
end
local reply = {'OK', changes}
if changes == 0 then return reply end
call('HSET', OPTIONS, 'lanes', 1)
call('HINCRBY', OPTIONS, 'lanes_changed', 1)
wake()
return remember(reply)
