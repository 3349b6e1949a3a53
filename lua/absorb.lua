-- absorb: merges the counters and the history of former shards into their topic.
-- Guarantee: takes effect once, however often it is called: the shard count leaves the layout in the
-- same step. A repeated call returns 0; the caller then deletes the keys as after a crash.
-- The field `removed:<count>` tells managers which keys are still to be deleted (see clear).
-- KEYS  the prelude's, then the topic's history and the merged one that replaces it
-- ARGV  the layout's number; the shard count to merge; for each shard with a journal, the field
--       `journaled:<shard>` and its last number, all separated by spaces; n; n times counter, value
-- Returns {'OK', 1 if this call merged the count, else 0}
local number, count = tonumber(ARGV[ARGS + 1]), ARGV[ARGS + 2]
local journals, n = ARGV[ARGS + 3], tonumber(ARGV[ARGS + 4])
local HISTORY, MERGED = KEYS[ID_KEYS + 1], KEYS[ID_KEYS + 2]
local known, current, older, gone = read_layout()
local left, found = without(gone or '', count)
if not found or tonumber(known) ~= number then
  call('UNLINK', MERGED)
  return {'OK', 0}
end
allow_writes_at_maxmemory()
local fields = {'removed:' .. count, '1'}
for part in string.gmatch(journals, '%S+') do fields[#fields + 1] = part end
call('HSET', OPTIONS, unpack(fields))
write_layout(known, current, older, left)
for i = 1, n do
  local name, value = ARGV[ARGS + 3 + 2 * i], ARGV[ARGS + 4 + 2 * i]
  local group = string.match(name, '^late_max@(.*)')
  if group then keep_highest(group, value) else call('HINCRBY', STATS, name, value) end
end
if call('EXISTS', MERGED) == 1 then
  call('PERSIST', MERGED)
  call('RENAME', MERGED, HISTORY)
end
return {'OK', 1}
