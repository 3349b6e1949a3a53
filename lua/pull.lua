-- pull: ready -> in flight, for those who keep no connection blocked on the stream.
-- Guarantee: each delivery gets its own ack timeout in the same step. Bodies follow by open: no
-- script finds an id and touches that id's own key.
-- KEYS  the prelude's
-- ARGV  own group's number; consumer; the most to take; own ack timeout in ms or '' for the topic's
-- Returns {'OK', paused 0/1, last id that the group was given, {entry, {field, value, ...}}, ...};
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local consumer, most, timeout = ARGV[ARGS + 2], tonumber(ARGV[ARGS + 3]), ARGV[ARGS + 4]
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
local last = ''
for _, info in ipairs(call('XINFO', 'GROUPS', group.ready)) do
  if field(info, 'name') == group.name then last = field(info, 'last-delivered-id') end
end
return {'OK', 0, last, unpack(taken)}
