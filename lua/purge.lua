-- purge: garbage -> settled (purged).
-- Guarantee: only messages in this group's garbage end. The body is deleted with the last group that
-- owes it. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them, then for each message: body, done
-- ARGV  own group's number; only messages that died at or before this epoch ms, or '' for all; n;
--       n times id
-- Returns {'OK', letters}: y purged, n not in this group's garbage (or too young); {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local before = tonumber(ARGV[ARGS + 2])
local n, first = tonumber(ARGV[ARGS + 3]), ARGS + 3
local _, now = clock()
local letters, purged = {}, {}
local events, journaled = {}, is_journaled()
local ids, bodies, dones, stones = {}, {}, {}, {}
allow_writes_at_maxmemory()
for i = 1, n do
  local id, body = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1]
  local died = tonumber(call('ZSCORE', group.garbage, id) or '')
  letters[i] = 'n'
  if died and (not before or died <= before) then
    call('ZREM', group.garbage, id)
    leave_lane(group, id)
    letters[i], purged[#purged + 1] = 'y', id
    local guard, k = fence(body), #ids + 1
    local attempts, still_owed = call('HGET', group.attempts, id) or 0, owed(id)
    if journaled then
      local event = {id, 'purged', group.name, attempts}
      if not still_owed then event[5], event[6] = 'end', 1 end
      events[#events + 1] = event
    end
    if still_owed then
      mark_partly_settled(body)
    elseif guard == '' then
      call('HDEL', POLICY, id)
      call('ZREM', EXPIRY, id)
    else
      ids[k], bodies[k], dones[k] = id, body, KEYS[ID_KEYS + 2 * i]
      stones[k] = tombstone(guard, 'purged', nil, attempts, now)
    end
  end
end
if #purged > 0 then forget_failures(group, purged) end
finish(ids, bodies, dones, stones)
count('purged', #purged, group)
journal(events)
local reply = {'OK', table.concat(letters)}
return #purged > 0 and remember(reply) or reply
