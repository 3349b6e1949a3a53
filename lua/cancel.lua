-- cancel: waiting, retry, ready, garbage -> settled (cancelled).
-- Guarantee: truthful. 'cancelled' only if no group has the message in flight or has settled it;
-- otherwise nothing changes. A repeated call finds its own tombstone and returns the same.
-- Features: keys (the messages have one, whose list was read).
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  the layout's number ('' to skip the check); the number of the part of their key's list that the
--       caller read ('' to skip the check); that part; n; n times id
-- Returns {'OK', letters}: c cancelled, f in flight, d done, u unknown; {'LISTED'} if that part has
--       changed; {'SHARDS'}; {'GROUPS', ...}
local changed = misplaced(ARGV[ARGS + 1]) or changed_topic()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 4]), ARGS + 4
if USES.keys then
  local part = ARGV[ARGS + 2]
  if part ~= '' and has_other_list(ARGV[first + 1], part, ARGV[ARGS + 3]) then return {'LISTED'} end
end
local _, now = clock()
local letters, ended = {}, {}
local ids, bodies, dones, stones = {}, {}, {}, {}
local events, journaled = {}, is_journaled()

-- Ends one message in all groups; bodies and tombstones are written together at the end.
local function cancel(i, id, due, guard)
  local attempts, k = 0, #ids + 1
  for _, group in ipairs(groups) do
    attempts = math.max(attempts, tonumber(call('HGET', group.attempts, id) or 0))
    if due then forget_failures(group, {id}) else take_out(group, id) end
  end
  if due then call('ZREM', WAITING, id) end
  ended[id], ids[k] = true, id
  bodies[k], dones[k] = KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  stones[k] = tombstone(guard, 'cancelled', due and int(tonumber(due)), attempts, now)
  if journaled then events[k] = {id, 'cancelled', '', attempts, 'end', 1} end
end

allow_writes_at_maxmemory()
for i = 1, n do
  local id, body = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1]
  local guard = fence(body)
  if guard == '' then
    letters[i] = verdict(KEYS[ID_KEYS + 2 * i])
  elseif ended[id] then
    letters[i] = 'c'
  else
    local due = call('ZSCORE', WAITING, id)
    letters[i] = not due and why_not_taken_back(id, body, false) or 'c'
    if letters[i] == 'c' then cancel(i, id, due, guard) end
  end
end
finish(ids, bodies, dones, stones)
count('cancelled', #ids)
journal(events)
return {'OK', table.concat(letters)}
