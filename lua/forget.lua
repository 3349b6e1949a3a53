-- forget: deletes unused consumer names.
-- Guarantee: only in the step that finds nothing pending for the name: XGROUP DELCONSUMER would
-- lose pending entries. A repeated call returns the same: a missing name is unused.
-- KEYS  the prelude's, then the topic's consumers
-- ARGV  own group's number; least idle time in ms; n; n times consumer
-- Returns {'OK', deleted consumer, ...}; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local least, n, first = tonumber(ARGV[ARGS + 2]), tonumber(ARGV[ARGS + 3]), ARGS + 3
local known, reply = {}, {'OK'}
for _, info in ipairs(call('XINFO', 'CONSUMERS', group.ready, group.name)) do
  known[field(info, 'name')] = info
end
for i = 1, n do
  local name = ARGV[first + i]
  local info = known[name]
  local unused = not info or (field(info, 'pending') == 0 and field(info, 'idle') >= least)
  if unused then
    if info then call('XGROUP', 'DELCONSUMER', group.ready, group.name, name) end
    call('HDEL', KEYS[ID_KEYS + 1], name)
    reply[#reply + 1] = name
  end
end
return reply
