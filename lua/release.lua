-- release: in flight -> ready, without an attempt, as a new entry.
-- Guarantee: applies only to the delivery that the receipt names. A repeated call returns the first
-- answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; n; n times id, entry
-- Returns {'OK', letters}: y released, s stale; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 2 * i - 1] end
local indexed = call('HMGET', group.entries, unpack(ids))

local letters, held, entries, dues, seen = {}, {}, {}, {}, {}
for i = 1, n do
  local entry = ARGV[first + 2 * i]
  letters[i] = 's'
  if indexed[i] == entry and not seen[ids[i]] then
    local k = #held + 1
    seen[ids[i]], letters[i] = true, 'y'
    held[k], entries[k], dues[k] = ids[i], entry, false
  end
end
local reply = {'OK', table.concat(letters)}
if #held == 0 then return reply end

allow_writes_at_maxmemory()
local events = put_back(group, held, entries, dues, {})
if is_journaled() then journal(events) end
return remember(reply)
