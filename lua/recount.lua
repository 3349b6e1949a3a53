-- recount: counts the slots and the parked messages of lanes, which other programs may have falsified.
-- Guarantee: a lane whose counts were too high goes on. With judge, it reports the lanes and changes
-- nothing. A repeated call finds nothing more to correct.
-- KEYS  the prelude's
-- ARGV  own group's number; 1 only to judge, else 0; n; n times the key of a lane
-- Returns {'OK', the keys of lanes whose counts were wrong, ...}; {'GROUPS', ...}
local changed = changed_topic()
if changed then return changed end

local reply = {'OK'}
if USES.lanes then
  local group, judge = groups[tonumber(ARGV[ARGS + 1])], ARGV[ARGS + 2] == '1'
  local keys, wrong = {unpack(ARGV, ARGS + 4, ARGS + 3 + tonumber(ARGV[ARGS + 3]))}, {}
  local used, lanes = has_lanes() and slots_by_key(group), has_lanes() and lanes_of(group, keys) or {}
  for key, lane in pairs(lanes) do
    local slots, parked = used[key] or 0, call('ZLEXCOUNT', group.queues, '[' .. key .. US, '(' .. key .. ' ')
    if key ~= US and (lane.used ~= slots or lane.parked ~= parked) then
      lane.used, lane.parked, wrong[#wrong + 1], reply[#reply + 1] = slots, parked, key, key
    end
  end
  if not judge and #wrong > 0 then
    allow_writes_at_maxmemory()
    save_lanes(group, wrong)
    reopen(group, wrong)
  end
end
return reply
