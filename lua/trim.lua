-- trim: removes foreign entries from a group's stream: delivered, not pending, not in the index.
-- Guarantee: never by length, so no unread and no pending entry is ever lost. A repeated call finds
-- nothing more to remove; the topic's counters include what the first one removed.
-- KEYS  the prelude's
-- ARGV  own group's number; first id of the window ('-', or '(' and the last one seen); its size
-- Returns {'OK', cursor or '' at the end, removed, entries in the stream, ids in the index};
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local from, most = ARGV[ARGS + 2], math.min(tonumber(ARGV[ARGS + 3]), 500)
local last = last_delivered(group)
local window = last and call('XRANGE', group.ready, from, last, 'COUNT', most) or {}
local foreign = {}
for _, item in ipairs(window) do
  local id = field(item[2], 'id')
  local indexed = id and call('HGET', group.entries, id) == item[1]
  if not indexed and not pending(group, item[1]) then foreign[#foreign + 1] = item[1] end
end
allow_writes_at_maxmemory()
if #foreign > 0 then call('XDEL', group.ready, unpack(foreign)) end
count('trimmed', #foreign, group)
local cursor = #window == most and '(' .. window[#window][1] or ''
return {'OK', cursor, #foreign, call('XLEN', group.ready), call('HLEN', group.entries)}
