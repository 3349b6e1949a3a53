-- release: in flight -> ready, unhandled, as a new entry; no attempt is counted.
-- Guarantee: counts only for the delivery that the receipt names.
-- KEYS  the prelude's
-- ARGV  own group's number; n; n times id, entry
-- Returns {'OK', letters}: y given back, s stale; {'GROUPS', ...}
local changed = changed_groups()
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
if #back > 0 then
  begin_freeing()
  add_ready(group, back, dues, failed_attempts(group, back))
  drop_entries(group, {}, old)
  call('ZREM', group.leases, unpack(back))
  count('released', #back, group)
  journal(events)
end
return {'OK', table.concat(letters)}
