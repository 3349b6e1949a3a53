-- requeue: garbage -> that group's retry, due now, its failed attempts forgotten.
-- Guarantee: only what is in this group's garbage moves; other groups keep theirs. A ttl that still
-- stood for other groups ends: it would take back what the operator gave.
-- KEYS  the prelude's
-- ARGV  own group's number; n; n times id
-- Returns {'OK', letters}: y requeued, n not in this group's garbage; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local _, now = clock()
local letters, moved = {}, 0
local events, journaled = {}, is_journaled()
begin_freeing()
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
if moved > 0 then wake() end
return {'OK', table.concat(letters)}
