-- pull: ready -> in flight, for callers that do not block on the stream.
-- Guarantee: each delivery gets its own ack timeout in the same step. Bodies are read by open: no
-- script may find an id and access that id's own key. A repeated call returns what the first one took
-- and the consumer still holds.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; consumer; the maximum to take; own ack timeout in ms or '' for the topic's
-- Returns {'OK', paused 0/1, the group's last delivered id, {entry, {field, value, ...}}, ...};
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local consumer, most, timeout = ARGV[ARGS + 2], tonumber(ARGV[ARGS + 3]), ARGV[ARGS + 4]

-- Entries that were taken together are adjacent.
local before = answered()
if before then
  local held = {}
  for _, item in ipairs(call('XRANGE', group.ready, before[3], before[4], 'COUNT', most)) do
    local now_held = pending(group, item[1])
    if now_held and now_held[2] == consumer then held[#held + 1] = item end
  end
  return {'OK', 0, before[2], unpack(held)}
end

if call('HGET', OPTIONS, 'paused') == '1' then return {'OK', 1, ''} end
local reply = call('XREADGROUP', 'GROUP', group.name, consumer, 'COUNT', math.min(most, 500),
  'STREAMS', group.ready, '>')
local taken = reply and reply[1] and reply[1][2] or {}
if timeout ~= '' then
  local _, now = clock()
  for _, item in ipairs(taken) do
    local id = field(item[2], 'id')
    if id then call('ZADD', group.leases, int(now + tonumber(timeout)), id) end
  end
end
local last = last_delivered(group) or ''
if #taken > 0 then remember({'OK', last, taken[1][1], taken[#taken][1]}) end
return {'OK', 0, last, unpack(taken)}
