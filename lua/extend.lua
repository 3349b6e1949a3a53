-- extend: in flight, the lease starts anew.
-- Guarantee: only for deliveries that the index names and that this consumer still owns; nothing
-- is taken from anyone. JUSTID leaves the delivery count alone.
-- KEYS  the prelude's
-- ARGV  own group's number; consumer; own ack timeout in ms or '' for the topic's; n;
--       n times id, entry
-- Returns {'OK', letters}: k kept, l lost; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local consumer, timeout = ARGV[ARGS + 2], ARGV[ARGS + 3]
local n, first = tonumber(ARGV[ARGS + 4]), ARGS + 4
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 2 * i - 1] end
local indexed = call('HMGET', group.entries, unpack(ids))
local _, now = clock()

local letters, events, journaled = {}, {}, is_journaled()
for i = 1, n do
  local entry = ARGV[first + 2 * i]
  local held = indexed[i] == entry and pending(group, entry)
  if held and held[2] == consumer then
    call('XCLAIM', group.ready, group.name, consumer, 0, entry, 'JUSTID')
    if timeout ~= '' then call('ZADD', group.leases, int(now + tonumber(timeout)), ids[i]) end
    letters[i] = 'k'
    if journaled then
      local attempt = field(read_entry(group, entry) or {}, 'attempt') or 1
      events[#events + 1] = {ids[i], 'extended', group.name, attempt}
    end
  else
    letters[i] = 'l'
  end
end
journal(events)
return {'OK', table.concat(letters)}
