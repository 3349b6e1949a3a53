-- mend: puts an id right that a foreign hand (or a lost server) left standing wrongly.
-- Guarantee: never loses a live message: one without any place goes to waiting, due now; one whose
-- stream entry is gone goes to that group's retry, due now. Records of ids that are not live go.
-- KEYS  the prelude's, then for each id: body
-- ARGV  n; n times id
-- Returns {'OK', what was done for each id, as words with a blank between, or ''}; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 1]), ARGS + 1
local _, now = clock()
local reply, woken = {'OK'}, false

-- One group's places of a live message, reduced to one. Answers how many were right already.
local function mend_group(group, id, said)
  local entry = call('HGET', group.entries, id)
  local fields = entry and read_entry(group, entry)
  if entry and not (fields and field(fields, 'id') == id) then
    call('ZADD', group.retry, int(now), id)
    drop_entries(group, {id}, {entry})
    said[#said + 1], woken, entry = 'entry-lost', true, nil
  end
  local places = entry and 1 or 0
  for _, zset in ipairs({group.retry, group.garbage}) do
    if call('ZSCORE', zset, id) then
      places = places + 1
      if places > 1 then
        call('ZREM', zset, id)
        said[#said + 1] = 'second-place'
      end
    end
  end
  if places == 0 then forget_failures(group, {id}) end
  return math.min(places, 1)
end

local function mend_live(id, said)
  local waits, places = call('ZSCORE', WAITING, id), 0
  for _, group in ipairs(groups) do
    places = places + mend_group(group, id, said)
  end
  if waits and places > 0 then
    call('ZREM', WAITING, id)
    said[#said + 1] = 'second-place'
  elseif not waits and places == 0 then
    call('ZADD', WAITING, int(now), id)
    said[#said + 1], woken = 'no-place', true
  end
end

local function mend_dead(id, said)
  local found = call('ZREM', WAITING, id) + call('HDEL', POLICY, id) + call('ZREM', EXPIRY, id)
  for _, group in ipairs(groups) do
    if take_out(group, id) then found = found + 1 end
  end
  if found > 0 then said[#said + 1] = 'no-body' end
end

begin_freeing()
for i = 1, n do
  local id, said = ARGV[first + i], {}
  if call('EXISTS', KEYS[ID_KEYS + i]) == 1 then mend_live(id, said) else mend_dead(id, said) end
  reply[i + 1] = table.concat(said, ' ')
end
if woken then wake() end
return reply
