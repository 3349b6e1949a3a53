-- ack: in flight -> settled.
-- Guarantee: applies only to the delivery that the receipt names. A late success (the lease was
-- reclaimed) still settles the message in any state, if the send token matches.
-- The body is deleted with the last group that owes it. A repeated call returns r: tombstones and
-- marks outlast the time in which callers repeat a call.
-- Features: strays (deliveries that the group no longer holds, or that are given twice), keys (some
-- messages have one), groups, journal.
-- KEYS  the prelude's, then by columns for each delivery: body, done
-- ARGV  own group's number; the final state (acked, or expired for one opened past its ttl);
--       lateness letters and the highest lateness to keep; n;
--       n each of id, entry, tombstone without its last field (guard, state, due, attempt)
-- Returns {'OK', letters}: a settled, l settled late, s stale, r settled by an earlier call;
--       {'GROUPS', ...}; {'FEATURES', ...}
local own, state, buckets = tonumber(ARGV[ARGS + 1]), ARGV[ARGS + 2], ARGV[ARGS + 3]
local n = tonumber(ARGV[ARGS + 4])
local ID, ENTRY, STONE = ARGS + 4, ARGS + 4 + n, ARGS + 4 + 2 * n
local BODY, DONE = ID_KEYS, ID_KEYS + n

local n_given = n
local changed = changed_groups()
if changed then return changed end

local group = groups[own]
local _, now = clock()
local indexed = call('HMGET', group.entries, unpack(ARGV, ID + 1, ID + n))
if not USES.journal then
  if is_journaled() then return {'FEATURES', 'journal'} end
end
local filling
if USES.lanes then
  lanes_in_use = settling_options()[4] == '1'
  filling = lanes_in_use and call('HMGET', OPTIONS, 'max_ready', 'lanes_changed', 'paused')
  if filling and filling[3] ~= '1' then will_fill(group) end
else
  if settling_options()[4] == '1' then return {'FEATURES', 'lanes'} end
end
if not USES.strays then
  for i = 1, n do
    if indexed[i] ~= ARGV[ENTRY + i] then return {'FEATURES', 'strays'} end
  end
end

local outcomes, lateness, late, stale = string.rep('a', n), string.sub(buckets, 1, n), 0, 0
local highest = string.sub(buckets, n + 1)

-- Ids already settled by this call, which may contain an older delivery of the same message; and those
-- that are settled late.
local seen, is_late

-- A late success: removes the message from the group, if it is the same message. A message that only
-- exceeded its ttl is kept, because it may have a new due time and a new ttl.
local function settle_late(i)
  local id, token = ARGV[ID + i], string.sub(ARGV[STONE + i], 1, 8)
  local live = fence(KEYS[BODY + i])
  if string.sub(live, 1, 8) == token then
    if seen[id] then return 'r' end
    if state == 'acked' then
      if owes(group, id) then
        take_out(group, id)
        return 'l'
      end
      if GROUP_COUNT == 1 and call('ZREM', WAITING, id) == 1 then
        forget_failures(group, {id})
        return 'l'
      end
    end
    return is_partly_settled(live) and 'r' or 's'
  end
  local stone = live == '' and call('GET', KEYS[DONE + i]) or ''
  local same = string.sub(stone, 1, 8) == token
  return same and string.match(stone, '^.........(%a+)') == state and 'r' or 's'
end

-- Leaves the deliveries of these numbers in the columns.
local function keep(numbers)
  for k, i in ipairs(numbers) do
    ARGV[ID + k], ARGV[STONE + k], KEYS[BODY + k], KEYS[DONE + k] =
      ARGV[ID + i], ARGV[STONE + i], KEYS[BODY + i], KEYS[DONE + i]
  end
  n = #numbers
end

if USES.strays then
  allow_writes_at_maxmemory()
  local letters, held, held_entries, gone = {}, {}, {}, {}
  seen, is_late, lateness = {}, {}, ''
  for i = 1, n do
    local id = ARGV[ID + i]
    if indexed[i] ~= ARGV[ENTRY + i] then
      letters[i] = settle_late(i)
    else
      letters[i] = seen[id] and 'r' or 'a'
    end
    if letters[i] == 'a' then
      held[#held + 1], held_entries[#held_entries + 1] = id, indexed[i]
      lateness = lateness .. string.sub(buckets, i, i)
    end
    if letters[i] == 'l' then late, is_late[id] = late + 1, true end
    if letters[i] == 's' then stale = stale + 1 end
    if letters[i] == 'a' or letters[i] == 'l' then seen[id], gone[#gone + 1] = true, i end
  end
  if #held > 0 then drop_entries(group, held, held_entries) end
  outcomes, highest = table.concat(letters), lateness ~= '' and highest or ''
  keep(gone)
else
  drop_entries(group, {unpack(ARGV, ID + 1, ID + n)}, indexed)
end

-- Data that only a few messages have.
local has_more = n > 0
  and call('EXISTS', POLICY, EXPIRY, group.attempts, group.reasons, group.leases) > 0
if has_more then forget_failures(group, {unpack(ARGV, ID + 1, ID + n)}) end

local settled, still_owed = n, nil
if USES.groups then
  still_owed = owed_among({unpack(ARGV, ID + 1, ID + n)})
end
if USES.journal then
  local events = {}
  for i = 1, is_journaled() and n or 0 do
    local id = ARGV[ID + i]
    local due, attempt = string.match(ARGV[STONE + i], '^.........[^,]*,([^,]*),([^,]*)')
    local event = {id, state, group.name, attempt, 'due', due}
    if not (still_owed and still_owed[id]) then event[7], event[8] = 'end', 1 end
    if is_late and is_late[id] then
      event[#event + 1], event[#event + 2] = 'reason', 'after its lease had ended'
    end
    events[i] = event
  end
  journal(events)
end
if USES.groups then
  local ended = {}
  for i = 1, n do
    if still_owed[ARGV[ID + i]] then mark_partly_settled(KEYS[BODY + i]) else ended[#ended + 1] = i end
  end
  keep(ended)
end
if n > 0 then
  call('UNLINK', unpack(KEYS, BODY + 1, BODY + n))
  if has_more then forget_policies({unpack(ARGV, ID + 1, ID + n)}) end
  if USES.keys then
    list_by_key({unpack(ARGV, ID + 1, ID + n)}, false)
  end
  local stones, settled_at = sized(2 * n + 2), int(now)
  for i = 1, n do
    stones[2 * i - 1], stones[2 * i] = KEYS[DONE + i], ARGV[STONE + i] .. settled_at
  end
  keep_tombstones(stones, 2 * n)
end
if state == 'acked' then
  count('acked', settled, group)
  count_lateness(group, lateness)
  keep_highest(group.name, highest)
else
  count(state, n)
end
if USES.lanes then
  if group.is_filled then
    local _, _, opens_sooner = fill(group, math.max(100, n_given), filling)
    if opens_sooner then wake() end
  end
end
count('acked_late', late, group)
count('stale', stale, group)
return {'OK', outcomes}
