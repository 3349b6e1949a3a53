-- expire: waiting, retry, ready past its ttl -> settled (expired); waiting, too late for a late policy
-- -> settled (skipped), or the garbage of every group.
-- Guarantee: re-checks each id given by the caller; deliveries in flight finish. Messages in garbage
-- have no ttl. A late policy concerns only messages that were never promoted. Collapse skips a message
-- if a newer occurrence of its schedule waits and is due, or was promoted, as the caller saw. A message
-- that it keeps has no late policy any more. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them, then for each message: body, done
-- ARGV  n; n times id, the number of newer occurrences of its schedule (for collapse; -1 if one was
--       promoted; the ids of all follow at the end)
-- Returns {'OK', letters}: x expired, s skipped, g garbage, k kept by collapse, f in flight,
--       n neither past its ttl nor too late, o no longer live; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 1]), ARGS + 1
local _, now = clock()
local letters, ended = {}, {}
local ids, bodies, dones, stones = {}, {}, {}, {}
local events, journaled = {}, is_journaled()

-- Drops an id from a group unless it is in flight there ('f') or dead ('g').
local function drop_unless_kept(group, id)
  local entry = call('HGET', group.entries, id)
  if entry and pending(group, entry) then return 'f' end
  if call('ZSCORE', group.garbage, id) then return 'g' end
  if entry then drop_entries(group, {id}, {entry}) end
  local was_held = entry or call('ZREM', group.retry, id) == 1
  was_held = leave_lane(group, id) or was_held
  if not was_held then return nil end
  forget_failures(group, {id})
  return nil, true
end

-- Ends one message, or returns why not; bodies and tombstones are written together at the end.
local function expire(i, id, guard)
  local attempts, kept, k, dropped = 0, nil, #ids + 1, {}
  local due = tonumber(call('ZSCORE', WAITING, id) or '')
  for _, group in ipairs(groups) do
    attempts = math.max(attempts, tonumber(call('HGET', group.attempts, id) or 0))
    if due then
      forget_failures(group, {id})
    else
      local why, was_dropped = drop_unless_kept(group, id)
      if kept ~= 'f' then kept = why or kept end
      if was_dropped then dropped[#dropped + 1] = group.name end
    end
  end
  if due then call('ZREM', WAITING, id) end
  if kept == 'g' then call('ZREM', EXPIRY, id) end
  if kept then
    for _, name in ipairs(journaled and dropped or {}) do
      events[#events + 1] = {id, 'expired', name, attempts}
    end
    return kept == 'f' and 'f' or 'n'
  end
  ended[id], ids[k] = true, id
  bodies[k], dones[k] = KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  stones[k] = tombstone(guard, 'expired', due and int(due), attempts, now)
  if journaled then events[#events + 1] = {id, 'expired', '', attempts, 'end', 1} end
  return 'x'
end

-- Newer occurrences of each message's schedule, as far as the caller knows them.
local newer, up_to = {}, first + 2 * n
for i = 1, n do
  local many = tonumber(ARGV[first + 2 * i])
  newer[i] = {from = up_to + 1, to = up_to + many, was_promoted = many < 0}
  up_to = up_to + math.max(many, 0)
end

local function has_newer(i)
  if newer[i].was_promoted then return true end
  for j = newer[i].from, newer[i].to do
    local due = call('ZSCORE', WAITING, ARGV[j])
    if due and tonumber(due) <= now then return true end
  end
  return false
end

local late, own_late = late_policies()
local skipped, buried, kept = 0, 0, 0

local function bury(id, due)
  local why = string.format('LatePolicy: first promoted %s ms after its due time', int(now - due))
  for _, group in ipairs(groups) do
    call('ZADD', group.garbage, int(now), id)
    call('HSET', group.reasons, id, why)
    if journaled then events[#events + 1] = {id, 'garbage', group.name, 0, 'reason', why} end
  end
  call('ZREM', WAITING, id)
  call('ZREM', EXPIRY, id)
  buried = buried + 1
end

-- Applies the late policy of a message that was never promoted.
local function judge(i, id, guard)
  local due = (late or own_late) and tonumber(call('ZSCORE', WAITING, id) or '')
  if not due or GROUP_COUNT == 0 then return 'n' end
  local own = own_late and call('HGET', POLICY, id) or nil
  local action = late_action(id, due, now, late, own)
  if not action then return 'n' end
  if action == 'garbage' then
    bury(id, due)
    return 'g'
  end
  if action == 'collapse' and not has_newer(i) then
    own = call('HGET', POLICY, id)
    local delays, _, lane = string.match(own or '*', '^([^;]*);?([^;]*)(.*)$')
    put_policy(id, delays .. ';0,run' .. lane)
    kept = kept + 1
    return 'k'
  end
  local m = #ids + 1
  call('ZREM', WAITING, id)
  ended[id], ids[m] = true, id
  bodies[m], dones[m] = KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  stones[m] = tombstone(guard, 'skipped', int(due), 0, now)
  if journaled then events[#events + 1] = {id, 'skipped', '', 0, 'end', 1} end
  skipped = skipped + 1
  return 's'
end

allow_writes_at_maxmemory()
for i = 1, n do
  local id, body = ARGV[first + 2 * i - 1], KEYS[ID_KEYS + 2 * i - 1]
  local ends, guard = tonumber(call('ZSCORE', EXPIRY, id) or ''), fence(body)
  letters[i] = 'n'
  if ends and guard == '' then
    call('ZREM', EXPIRY, id)
    letters[i] = 'o'
  elseif ends and ends <= now and not ended[id] then
    letters[i] = expire(i, id, guard)
  elseif guard ~= '' and not ended[id] then
    letters[i] = judge(i, id, guard)
  elseif guard == '' and call('ZREM', WAITING, id) == 1 then -- its body is gone, as after an eviction
    letters[i] = 'o'
  end
end
finish(ids, bodies, dones, stones)
count('expired', #ids - skipped)
count('skipped', skipped)
for _, group in ipairs(groups) do count('garbage', buried, group) end
journal(events)
local reply = {'OK', table.concat(letters)}
return #ids + buried + kept > 0 and remember(reply) or reply
