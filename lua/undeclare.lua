-- undeclare: removes a group, and settles the messages it owes page by page.
-- Guarantee: after the first call the group receives nothing more; other groups keep their messages.
-- The caller lists a page of the group's ids, and this call settles them for the group; with no ids
-- left it deletes the group's keys. Safe to repeat after a crash at any point: a mark in the topic's
-- options lasts until the end. Without the mark, a removal that has begun does not continue: the group
-- was declared again. Nor does it continue if the group is declared in spite of its mark, which is then
-- deleted: another program or a restored archive has written it. Keys without messages and without a
-- removal are deleted in a separate call, if the group is not declared. A repeated call returns the
-- first answer.
-- KEYS  the prelude's (the groups that stay; the call's record), then the twelve of the group that goes, then for each
--       message: body, done
-- ARGV  the group to remove; 1 if the removal has begun, 2 if there is none and only keys without
--       messages are left, else 0; 1 to delete its keys if nothing is left, else 0; n; n times id
-- Returns {'OK', ids settled for good, 1 if there is nothing more to do, else 0}; {'GROUPS', ...}
local name, begun, drop = ARGV[ARGS + 1], ARGV[ARGS + 2] == '1', ARGV[ARGS + 3] == '1'
local mark, _, now = 'removing:' .. name, clock()
local k = ID_KEYS
local group = {
  name = name, ready = KEYS[k + 1], entries = KEYS[k + 2], retry = KEYS[k + 3],
  garbage = KEYS[k + 4], attempts = KEYS[k + 5], reasons = KEYS[k + 6], leases = KEYS[k + 7],
  lanes = KEYS[k + 8], parked = KEYS[k + 9], queues = KEYS[k + 10], turns = KEYS[k + 11],
  closed = KEYS[k + 12],
}

local function drop_keys()
  call('UNLINK', group.ready, group.entries, group.retry, group.garbage, group.attempts,
    group.reasons, group.leases, group.lanes, group.parked, group.queues, group.turns, group.closed)
end

local before = answered()
if before then return before end
if ARGV[ARGS + 2] == '2' then
  if call('HEXISTS', GROUPS, name) + call('HEXISTS', OPTIONS, mark)
    + call('EXISTS', group.entries, group.retry, group.garbage, group.parked) > 0 then return {'OK', 0, 0} end
  drop_keys()
  return {'OK', 0, 1}
end
if begun and (call('HEXISTS', OPTIONS, mark) == 0 or call('HEXISTS', GROUPS, name) == 1) then
  call('HDEL', OPTIONS, mark)
  return {'OK', 0, 1}
end
allow_writes_at_maxmemory()
call('HSET', OPTIONS, mark, int(now))
call('HDEL', GROUPS, name)
local changed = changed_topic()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 4]), ARGS + 4
local settled = 0
local events, journaled = {}, is_journaled()
for i = 1, n do
  local id, body, done = ARGV[first + i], KEYS[k + 11 + 2 * i], KEYS[k + 12 + 2 * i]
  local attempts, guard = call('HGET', group.attempts, id) or 0, fence(body)
  local was_owed = take_out(group, id)
  local ends = not owed(id) and not call('ZSCORE', WAITING, id) and guard ~= ''
  if ends then
    finish({id}, {body}, {done}, {tombstone(guard, 'purged', nil, attempts, now)})
    settled = settled + 1
  end
  if journaled and (was_owed or ends) then
    local event = {id, 'purged', name, attempts, 'reason', 'group removed'}
    if ends then event[7], event[8] = 'end', 1 end
    events[#events + 1] = event
  end
end
journal(events)
count('purged', settled, group)

local left = call('HLEN', group.entries) + call('ZCARD', group.retry) + call('ZCARD', group.garbage)
  + call('HLEN', group.parked)
local gone = 0
if drop and left == 0 then
  drop_keys()
  call('HDEL', OPTIONS, mark)
  for option_name in pairs(LANE_OPTIONS) do call('HDEL', OPTIONS, option_name .. '@' .. name) end
  gone = 1
end
local reply = {'OK', settled, gone}
return settled + gone > 0 and remember(reply) or reply
