-- ack: in flight -> settled.
-- Guarantee: counts only for the delivery that the receipt names. A success that comes late (its
-- lease was taken) still settles the message wherever it stands, if the send token is the same.
-- The body goes with the last group that owed it.
-- KEYS  the prelude's, then for each delivery: body, done
-- ARGV  own group's number; the final state (acked, or expired for one opened past its ttl);
--       lateness letters; n; n times id, entry, guard (token and mark), due, attempt
-- Returns {'OK', letters}: a settled, l settled late, s stale, r settled so by an earlier call;
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local own = tonumber(ARGV[ARGS + 1])
local group, state, buckets = groups[own], ARGV[ARGS + 2], ARGV[ARGS + 3]
local n, first = tonumber(ARGV[ARGS + 4]), ARGS + 4
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 5 * i - 4] end
local _, now = clock()
local indexed = call('HMGET', group.entries, unpack(ids))
begin_freeing()

-- A late success: the message, if it is still that one, leaves wherever this group has it. One that
-- was only found past its ttl stays: it may have got a new due time, and its ttl with it.
local function settle_late(i)
  local body, token = KEYS[ID_KEYS + 2 * i - 1], string.sub(ARGV[first + 5 * i - 2], 1, 8)
  local live = fence(body)
  if string.sub(live, 1, 8) == token then
    if state == 'acked' then
      if take_out(group, ids[i]) then return 'l' end
      if GROUP_COUNT == 1 and call('ZREM', WAITING, ids[i]) == 1 then return 'l' end
    end
    return is_partly_settled(live) and 'r' or 's'
  end
  local stone = live == '' and call('GET', KEYS[ID_KEYS + 2 * i]) or ''
  local same = string.sub(stone, 1, 8) == token
  return same and string.match(stone, '^.........(%a+)') == state and 'r' or 's'
end

local letters, matched, entries, gone = {}, {}, {}, {}
local matched_ids, lateness, late, stale, seen = {}, {}, 0, 0, {}
for i = 1, n do
  if indexed[i] == ARGV[first + 5 * i - 3] then
    letters[i] = seen[ids[i]] and 'r' or 'a'
  else
    letters[i] = settle_late(i)
  end
  if letters[i] == 'a' then
    seen[ids[i]] = true
    matched_ids[#matched_ids + 1], entries[#entries + 1] = ids[i], indexed[i]
    lateness[#lateness + 1] = string.sub(buckets, i, i)
    gone[#gone + 1] = i
  elseif letters[i] == 'l' then
    late = late + 1
    gone[#gone + 1] = i
  elseif letters[i] == 's' then
    stale = stale + 1
  end
end
if #matched_ids > 0 then
  drop_entries(group, matched_ids, entries)
  forget_failures(group, matched_ids)
end

-- As `tombstone` writes it, but what all have in common only once: this is the hot path.
local middle, ending = state .. ',', ',' .. int(now)
local done_ids, bodies, dones, stones = {}, {}, {}, {}
for _, i in ipairs(gone) do
  local body = KEYS[ID_KEYS + 2 * i - 1]
  if GROUP_COUNT > 1 and owed(ids[i]) then
    mark_partly_settled(body)
  else
    local k, at = #done_ids + 1, first + 5 * i
    done_ids[k], bodies[k], dones[k] = ids[i], body, KEYS[ID_KEYS + 2 * i]
    stones[k] = ARGV[at - 2] .. middle .. ARGV[at - 1] .. ',' .. ARGV[at] .. ending
  end
end
finish(done_ids, bodies, dones, stones)
if state == 'acked' then
  count('acked', #gone, group)
  count_lateness(group, table.concat(lateness))
else
  count(state, #done_ids)
end
count('acked_late', late, group)
count('stale', stale, group)
return {'OK', table.concat(letters)}
