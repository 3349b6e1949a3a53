-- ack: in flight -> settled.
-- Guarantee: applies only to the delivery that the receipt names. A late success (the lease was
-- reclaimed) still settles the message in any state, if the send token matches.
-- The body is deleted with the last group that owes it. A repeated call returns r: tombstones and
-- marks outlast the time in which callers repeat a call.
-- KEYS  the prelude's, then by columns for each delivery: body, done
-- ARGV  own group's number; the final state (acked, or expired for one opened past its ttl);
--       1 if all entries differ, else 0; lateness letters and the highest lateness to keep; n;
--       n each of id, entry, tombstone without its last field (guard, state, due, attempt)
-- Returns {'OK', letters}: a settled, l settled late, s stale, r settled by an earlier call;
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local own = tonumber(ARGV[ARGS + 1])
local group, state, distinct = groups[own], ARGV[ARGS + 2], ARGV[ARGS + 3] == '1'
local buckets, n = ARGV[ARGS + 4], tonumber(ARGV[ARGS + 5])
local ID, ENTRY, STONE = ARGS + 5, ARGS + 5 + n, ARGS + 5 + 2 * n
local BODY, DONE = ID_KEYS, ID_KEYS + n
local _, now = clock()
local indexed = call('HMGET', group.entries, unpack(ARGV, ID + 1, ID + n))
begin_freeing()

-- Ids already settled by this call, which may contain an older delivery of the same message.
local seen = {}

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

local all_match = distinct
for i = 1, n do all_match = all_match and indexed[i] == ARGV[ENTRY + i] end

local outcomes, lateness, gone, late, stale = nil, string.sub(buckets, 1, n), {}, 0, 0
if all_match then
  for i = 1, n do gone[i] = i end
  outcomes = string.rep('a', n)
  drop_entries(group, {unpack(ARGV, ID + 1, ID + n)}, indexed)
  forget_failures(group, {unpack(ARGV, ID + 1, ID + n)})
else
  local letters, ids, entries, counted = {}, {}, {}, {}
  for i = 1, n do
    local id = ARGV[ID + i]
    if indexed[i] == ARGV[ENTRY + i] then
      letters[i] = seen[id] and 'r' or 'a'
    else
      letters[i] = settle_late(i)
    end
    if letters[i] == 'a' or letters[i] == 'l' then seen[id] = true end
    if letters[i] == 'a' then
      ids[#ids + 1], entries[#entries + 1] = id, indexed[i]
      counted[#counted + 1] = string.sub(buckets, i, i)
      gone[#gone + 1] = i
    elseif letters[i] == 'l' then
      late = late + 1
      gone[#gone + 1] = i
    elseif letters[i] == 's' then
      stale = stale + 1
    end
  end
  if #ids > 0 then
    drop_entries(group, ids, entries)
    forget_failures(group, ids)
  end
  outcomes, lateness = table.concat(letters), table.concat(counted)
end

local ids, bodies, dones, stones, ending = {}, {}, {}, {}, int(now)
local events, journaled = {}, #gone > 0 and is_journaled()
local function tell(i, ends)
  local due, attempt = string.match(ARGV[STONE + i], '^.........[^,]*,([^,]*),([^,]*)')
  local event = {ARGV[ID + i], state, group.name, attempt, 'due', due}
  if ends then event[7], event[8] = 'end', 1 end
  if string.sub(outcomes, i, i) == 'l' then
    event[#event + 1], event[#event + 2] = 'reason', 'after its lease had ended'
  end
  events[#events + 1] = event
end
local owed = {}
if GROUP_COUNT > 1 then
  local settled = {}
  for k, i in ipairs(gone) do settled[k] = ARGV[ID + i] end
  owed = owed_among(settled)
end
for _, i in ipairs(gone) do
  local body, still_owed = KEYS[BODY + i], owed[ARGV[ID + i]]
  if journaled then tell(i, not still_owed) end
  if still_owed then
    mark_partly_settled(body)
  else
    local k = #ids + 1
    ids[k], bodies[k], dones[k] = ARGV[ID + i], body, KEYS[DONE + i]
    stones[k] = ARGV[STONE + i] .. ending
  end
end
finish(ids, bodies, dones, stones)
if state == 'acked' then
  count('acked', #gone, group)
  count_lateness(group, lateness)
  if lateness ~= '' then keep_highest(group.name, string.sub(buckets, n + 1)) end
else
  count(state, #ids)
end
journal(events)
count('acked_late', late, group)
count('stale', stale, group)
return {'OK', outcomes}
