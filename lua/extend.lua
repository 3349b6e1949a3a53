-- extend: in flight, with a new lease, or begun.
-- Guarantee: only for deliveries that the index names and that this consumer still holds. JUSTID
-- keeps the delivery count, which is 2 once the caller said that a handler has begun. A repeated call
-- renews the leases again; with a journal it returns the first answer instead, and is not journaled
-- twice.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; consumer; own ack timeout in ms or '' for the topic's; begun (0 or 1; 2 leaves
--       the leases as they are); n; n times id, entry
-- Returns {'OK', letters}: k kept, l lost; {'GROUPS', ...}
local changed = answered() or changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local consumer, timeout = ARGV[ARGS + 2], ARGV[ARGS + 3]
local begun, n, first = ARGV[ARGS + 4], tonumber(ARGV[ARGS + 5]), ARGS + 5
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 2 * i - 1] end
local indexed = call('HMGET', group.entries, unpack(ids))
local _, now = clock()

local letters, events, journaled = {}, {}, is_journaled()
for i = 1, n do
  local entry = ARGV[first + 2 * i]
  local held = indexed[i] == entry and pending(group, entry)
  if held and held[2] == consumer then
    letters[i] = 'k'
    call('XCLAIM', group.ready, group.name, consumer, 0, entry, 'IDLE', begun == '2' and held[3] or 0,
      'RETRYCOUNT', begun == '0' and held[4] or BEGUN, 'JUSTID')
    if begun ~= '2' then
      if timeout ~= '' then
        call('ZADD', group.leases, int(now + tonumber(timeout)), ids[i])
      else
        call('ZREM', group.leases, ids[i])
      end
    end
    if journaled and begun ~= '2' then
      local attempt = field(read_entry(group, entry) or {}, 'attempt') or 1
      events[#events + 1] = {ids[i], 'extended', group.name, attempt}
    end
  else
    letters[i] = 'l'
  end
end
journal(events)
local reply = {'OK', table.concat(letters)}
return #events > 0 and remember(reply) or reply
