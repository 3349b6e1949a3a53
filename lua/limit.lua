-- limit: sets or removes the limits of keys.
-- Guarantee: in the topic's own shard, each change has a number, higher than those before. Other shards have
-- copies: `open` begins the copy of a change, and `close` ends it. A shard that knows of a later change takes
-- no further part of an earlier one. 'declare' (a manager's YAML) sets like 'set', but changes only limits
-- that a declaration wrote last, and those of keys without limits. A repeated call returns the first answer.
-- KEYS  the prelude's, the topic's limits, the call's record
-- ARGV  set or declare (in the topic's own shard), open, copy or close; the number of the change (0 to set or
--       declare); n; n each of the field (a key, or a group, <US> and a key), its limits ('' to remove them)
-- Returns {'OK', keys whose limits changed, or -1 if the shard knows of a later change}
local before = answered()
if before then return before end

local LIMITS, what = KEYS[ID_KEYS + 1], ARGV[ARGS + 1]
local declared = what == 'declare'
local is_own = declared or what == 'set'
local number, n, first = tonumber(ARGV[ARGS + 2]), tonumber(ARGV[ARGS + 3]), ARGS + 3
local latest = tonumber(string.match(call('HGET', OPTIONS, 'limits') or '0', '^%d+'))
if not is_own and latest > number or (what == 'copy' or what == 'close') and latest < number then
  return {'OK', -1}
end

allow_writes_at_maxmemory()
local changes = 0
for i = 1, n do
  local name, limits = ARGV[first + i], ARGV[first + n + i]
  local is, mark = call('HGET', LIMITS, name) or '', 'declared limits:' .. name
  local written = not declared or is == '' or is == call('HGET', OPTIONS, mark)
  if limits == '' then call('HDEL', OPTIONS, mark) elseif declared then call('HSET', OPTIONS, mark, limits) end
  if written and is ~= limits then
    if limits ~= '' then call('HSET', LIMITS, name, limits) else call('HDEL', LIMITS, name) end
    changes = changes + 1
  end
end
if is_own then number = math.max(latest + 1, (clock())) end
if not is_own or changes > 0 then
  call('HSET', OPTIONS, 'limits', int(number) .. ((what == 'open' or what == 'copy') and '+' or ''))
end
local reply = {'OK', changes}
if changes == 0 then return reply end
call('HSET', OPTIONS, 'lanes', 1)
call('HINCRBY', OPTIONS, 'lanes_changed', 1)
wake()
return remember(reply)
