-- release: in flight -> ready, without an attempt, as a new entry.
-- Guarantee: applies only to the delivery that the receipt names. A repeated call returns the first
-- answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; n; n times id, entry
-- Returns {'OK', letters}: y released, s stale; {'GROUPS', ...}
local changed = answered() or changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 2 * i - 1] end
local indexed = call('HMGET', group.entries, unpack(ids))
local _, now = clock()

local letters, back, old, dues, seen = {}, {}, {}, {}, {}
local events, journaled = {}, is_journaled()
for i = 1, n do
  local entry = ARGV[first + 2 * i]
  if indexed[i] == entry and not seen[ids[i]] then
    seen[ids[i]] = true
    local fields = read_entry(group, entry)
    letters[i] = 'y'
    back[#back + 1], old[#old + 1] = ids[i], entry
    dues[#dues + 1] = fields and field(fields, 'due') or int(now)
    if journaled then
      events[#events + 1] = {ids[i], 'ready', group.name, field(fields or {}, 'attempt') or 1,
        'due', dues[#dues], 'reason', 'released'}
    end
  else
    letters[i] = 's'
  end
end
local reply = {'OK', table.concat(letters)}
if #back > 0 then
  begin_freeing()
  add_ready(group, back, dues, failed_attempts(group, back))
  drop_entries(group, {}, old)
  call('ZREM', group.leases, unpack(back))
  count('released', #back, group)
  journal(events)
  remember(reply)
end
return reply
