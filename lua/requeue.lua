-- requeue: garbage -> that group's retry, due now, with its failed attempts reset.
-- Guarantee: only messages in this group's garbage move; other groups are not affected. A ttl that
-- still applied to other groups ends, because it would undo the operator's action.
-- A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; n; n times id
-- Returns {'OK', letters}: y requeued, n not in this group's garbage; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local _, now = clock()
local letters, moved = {}, 0
local events, journaled = {}, is_journaled()
allow_writes_at_maxmemory()
for i = 1, n do
  local id = ARGV[first + i]
  letters[i] = 'n'
  if call('ZSCORE', group.garbage, id) then
    call('ZADD', group.retry, int(now), id)
    call('ZREM', group.garbage, id)
    call('ZREM', EXPIRY, id)
    forget_failures(group, {id})
    letters[i], moved = 'y', moved + 1
    if journaled then events[moved] = {id, 'requeued', group.name, 0, 'due', int(now)} end
  end
end
count('requeued', moved, group)
journal(events)
local reply = {'OK', table.concat(letters)}
if moved > 0 then
  remember(reply)
  wake()
end
return reply
