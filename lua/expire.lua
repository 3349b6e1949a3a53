-- expire: waiting, retry, ready past its ttl -> settled (expired).
-- Guarantee: re-checks each id given by the caller; deliveries in flight finish. Messages in garbage
-- have no ttl. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them, then for each message: body, done
-- ARGV  n; n times id
-- Returns {'OK', letters}: x expired, f in flight, n ttl not exceeded,
--       o no longer live; {'GROUPS', ...}
local changed = answered() or changed_groups()
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
  if not entry and call('ZREM', group.retry, id) == 0 then return nil end
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

begin_freeing()
for i = 1, n do
  local id, body = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1]
  local ends, guard = tonumber(call('ZSCORE', EXPIRY, id) or ''), fence(body)
  letters[i] = 'n'
  if ends and guard == '' then
    call('ZREM', EXPIRY, id)
    letters[i] = 'o'
  elseif ends and ends <= now and not ended[id] then
    letters[i] = expire(i, id, guard)
  end
end
finish(ids, bodies, dones, stones)
count('expired', #ids)
journal(events)
local reply = {'OK', table.concat(letters)}
return #ids > 0 and remember(reply) or reply
