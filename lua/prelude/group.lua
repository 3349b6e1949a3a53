-- prelude: the messages of a group, and which groups owe a message.

-- How many more entries the group's stream may hold: unread entries count, pending ones do not.
local function room(group, max_ready, wanted)
  local free = max_ready - call('XLEN', group.ready)
  if free >= wanted then return free end
  return free + call('XPENDING', group.ready, group.name)[1]
end

-- The ids of pairs of a due time and an id.
local function ids_among(pairs)
  local ids = {}
  for k = 2, #pairs, 2 do ids[#ids + 1] = pairs[k] end
  return ids
end

-- Two lists as pairs of their items.
local function paired(a, b)
  local pairs = {}
  for k, item in ipairs(a) do pairs[2 * k - 1], pairs[2 * k] = item, b[k] end
  return pairs
end

-- Adds messages, given as pairs {id, due time, id, due time, ...} with any failed attempts, to the group's
-- stream and index. The entry of a suspect, which is in `suspects`, says so; that of a first attempt has
-- its envelope from `carried`, by id, with the topic's ack timeout for consumers of version 0.1. With one
-- group, the pairs become those of the index.
local function add_ready(group, pairs, failed, suspects, carried, timeout)
  local ready, index = group.ready, GROUP_COUNT == 1 and pairs or {unpack(pairs)}
  if USES.lanes then
    if has_lanes() and not group.has_slots then occupy(group, pairs) end
  end
  for k = 1, #pairs, 2 do
    local id, due, before = pairs[k], pairs[k + 1], failed and tonumber(failed[(k + 1) / 2] or 0) or 0
    if suspects and suspects[id] then
      index[k + 1] = call('XADD', ready, '*', 'id', id, 'due', due, 'attempt', before + 1,
        'suspect', suspects[id])
    elseif before > 0 then
      index[k + 1] = call('XADD', ready, '*', 'id', id, 'due', due, 'attempt', before + 1)
    elseif carried and carried[id] then
      index[k + 1] = call('XADD', ready, '*', 'id', id, 'due', due, 'ack', timeout, 'body', carried[id])
    else
      index[k + 1] = call('XADD', ready, '*', 'id', id, 'due', due)
    end
  end
  if #index > 0 then call('HSET', group.entries, unpack(index)) end
end

local function failed_attempts(group, ids)
  if #ids == 0 or call('EXISTS', group.attempts) == 0 then return nil end
  return call('HMGET', group.attempts, unpack(ids))
end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return nil
end

-- The fields of one stream entry, or nil if it does not exist.
local function read_entry(group, entry)
  local found = call('XRANGE', group.ready, entry, entry)
  return found[1] and found[1][2]
end

-- The fields of many entries, false for missing ones. The entries are mostly adjacent and in order.
local function read_entries(group, entries)
  local known, found = {}, {}
  local range = call('XRANGE', group.ready, entries[1], entries[#entries], 'COUNT', #entries)
  for _, item in ipairs(range) do known[item[1]] = item[2] end
  for i, entry in ipairs(entries) do
    found[i] = known[entry] or read_entry(group, entry) or false
  end
  return found
end

-- The pending record {entry, consumer, idle, deliveries} of an entry, or nil if not in flight.
local function pending(group, entry)
  return call('XPENDING', group.ready, group.name, entry, entry, 1)[1]
end

-- The entries of a window of the pending list that were delivered more than a second in the future,
-- because the clock was set back. XPENDING reports a negative idle time as zero but filters by its
-- real value.
local function delivered_ahead(group, window)
  local ahead, any = {}, false
  for _, item in ipairs(window) do
    if item[3] <= 0 then ahead[item[1]], any = true, true end
  end
  if not any then return ahead end
  local others = call('XPENDING', group.ready, group.name, 'IDLE', '-1000', window[1][1],
    window[#window][1], #window)
  for _, item in ipairs(others) do ahead[item[1]] = nil end
  return ahead
end

-- What the server says of the group; nil if another program destroyed it.
local function group_info(group)
  for _, info in ipairs(call('XINFO', 'GROUPS', group.ready)) do
    if field(info, 'name') == group.name then return info end
  end
  return nil
end

-- The id of the last entry delivered to the group, or nil if another program destroyed the group.
local function last_delivered(group) return field(group_info(group) or {}, 'last-delivered-id') end

-- Whether entry `a` has a lower id than entry `b`.
local function is_before(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  a_ms, a_seq, b_ms, b_seq = tonumber(a_ms), tonumber(a_seq), tonumber(b_ms), tonumber(b_seq)
  return a_ms < b_ms or a_ms == b_ms and a_seq < b_seq
end

-- Deletes entries; returns how many of them were in flight.
local function drop_entries(group, ids, entries)
  local held = call('XACK', group.ready, group.name, unpack(entries))
  call('XDEL', group.ready, unpack(entries))
  if #ids > 0 then
    call('HDEL', group.entries, unpack(ids))
    if USES.lanes then
      if has_lanes() then vacate(group, ids) end
    end
  end
  return held
end

-- The reason of a failure or deferral, at most 1 KiB, and what follows its first zero byte: that byte and
-- a traceback, at most 2 KiB, or what `history` reads.
local function parted(reason)
  local at = string.find(reason, '\0', 1, true) or #reason + 1
  return string.sub(reason, 1, math.min(at - 1, 1024)), string.sub(reason, at, at + 2048)
end

-- What the group notes about each message that failed or was deferred, else false.
local function notes_of(group, ids)
  return #ids > 0 and call('EXISTS', group.reasons) == 1 and call('HMGET', group.reasons, unpack(ids)) or {}
end

-- From such a note: how often the message was deferred since its last failure, the entry that was
-- deferred last, and when its first attempt was due; '' if not known.
local function history(note)
  local times, entry, first = string.match(note or '', '%z%z(%d+) (%S*) ?(%-?%d*)$')
  return tonumber(times or 0), entry or '', first or ''
end

-- The end of a note, as `history` reads it.
local function ending(times, entry, first)
  return '\0\0' .. times .. ' ' .. entry .. ' ' .. first
end

-- When the first attempt of a message was due: as noted, or as the entry of a first attempt says; '' if
-- not known.
local function first_due(note, failed, fields)
  local _, _, first = history(note)
  if first ~= '' or tonumber(failed or 0) > 0 or not fields then return first end
  return string.match(field(fields, 'due') or '', '^%-?%d+$') or ''
end

-- The retries that are suspects, because each has ended a process or its lease, as {id = '1'}.
local function suspects_among(group, ids)
  local found = {}
  for i, note in ipairs(notes_of(group, ids)) do
    if note and parted(note) == SUSPECT_REASON then found[ids[i]] = '1' end
  end
  return found
end

-- Ends deliveries without counting an attempt: until `dues[i]` they wait in the group's retry, for the
-- reason `reasons[i]` or for their windows; those without a due time (false) return to ready as new
-- entries, or are parked while their lanes rest for `rests[i]` ms. Returns the events.
local function put_back(group, ids, entries, dues, reasons, rests)
  local failed, retry_head, earliest = failed_attempts(group, ids) or {}, head(group.retry), nil
  local events, again, back, counts, suspects = {}, {}, {}, {}, {}
  local notes, staying, parked, pauses = {}, {}, {}, {}
  local noted, found = notes_of(group, ids), read_entries(group, entries)
  for i, id in ipairs(ids) do
    local before, due, rest, fields = tonumber(failed[i] or 0) or 0, dues[i], rests and rests[i], found[i]
    local at = due and int(due) or fields and field(fields, 'due') or int(select(2, clock()))
    if due or rest then
      local reason = string.sub(reasons[i] or 'outside its window', 1, 1024)
      local first, k = first_due(noted[i], before, fields), #staying + 1
      staying[k], notes[2 * k - 1] = id, id
      notes[2 * k] = reason .. ending(history(noted[i]) + 1, entries[i], first)
      events[i] = {id, due and 'deferred' or 'parked', group.name, before, 'due', at, 'reason', reason}
    end
    if due then
      earliest = math.min(earliest or due, due)
      again[#again + 1], again[#again + 2] = at, id
    elseif rest then
      parked[#parked + 1], parked[#parked + 2], pauses[#pauses + 1] = id, at, rest
    else
      back[#back + 1], back[#back + 2], counts[#counts + 1] = id, at, before
      suspects[id] = fields and field(fields, 'suspect')
      events[i] = {id, 'ready', group.name, before + 1, 'due', at, 'reason', 'released'}
    end
  end
  if USES.lanes then
    if #pauses > 0 then
      call('HSET', OPTIONS, 'lanes', 1)
      lanes_in_use = true
    end
    if has_lanes() then hold_lanes(group, staying) end
  end
  drop_entries(group, ids, entries)
  if #again > 0 then call('ZADD', group.retry, unpack(again)) end
  if #notes > 0 then call('HSET', group.reasons, unpack(notes)) end
  add_ready(group, back, counts, suspects)
  if USES.lanes then
    if #pauses > 0 then park_resting(group, parked, pauses) end
  end
  call('ZREM', group.leases, unpack(ids))
  count('deferred', #staying, group)
  count('released', #counts, group)
  if earliest and (not retry_head or earliest < retry_head) then wake() end
  return events
end

-- Deletes what a group stores about ids besides their state; usually there is nothing.
local function forget_failures(group, ids)
  if call('EXISTS', group.attempts, group.reasons, group.leases) == 0 then return end
  call('HDEL', group.attempts, unpack(ids))
  call('HDEL', group.reasons, unpack(ids))
  call('ZREM', group.leases, unpack(ids))
end

-- Removes an id from a group in any state. Returns whether the group had it, and whether a consumer
-- of the group holds it (in flight).
local function take_out(group, id)
  local entry, found, held = call('HGET', group.entries, id), 0, 0
  if entry then
    held = drop_entries(group, {id}, {entry})
    found = 1
  end
  found = found + call('ZREM', group.retry, id) + call('ZREM', group.garbage, id)
  if leave_lane(group, id) then found = found + 1 end
  forget_failures(group, {id})
  return found > 0, held > 0
end

local function owes(group, id)
  return call('HEXISTS', group.entries, id) == 1 or call('ZSCORE', group.retry, id)
    or call('ZSCORE', group.garbage, id) or parked_due(group, id)
end

local function owed(id)
  for _, group in ipairs(groups) do
    if owes(group, id) then return true end
  end
  return false
end

-- The scores of many members. Falls back to ZSCORE if the user may not run ZMSCORE, because an error
-- in the middle of a settlement would leave it incomplete.
local function scores_of(zset, ids)
  local found = redis.pcall('ZMSCORE', zset, unpack(ids))
  if not found.err then return found end
  local scores = {}
  for i, id in ipairs(ids) do scores[i] = call('ZSCORE', zset, id) end
  return scores
end

-- The ids that some group owes, as {id = true}. Asks each key of a group once for all ids not found
-- before, which costs a tenth of asking id by id.
local function owed_among(ids)
  local found, open = {}, ids
  local function may_be_in(key) return #open > 0 and call('EXISTS', key) == 1 end
  local function take(there)
    local left = {}
    for i, id in ipairs(open) do
      if there[i] then found[id] = true else left[#left + 1] = id end
    end
    open = left
  end
  for _, group in ipairs(groups) do
    if may_be_in(group.entries) then take(call('HMGET', group.entries, unpack(open))) end
    if may_be_in(group.retry) then take(scores_of(group.retry, open)) end
    if may_be_in(group.garbage) then take(scores_of(group.garbage, open)) end
    if USES.lanes then
      if has_lanes() and may_be_in(group.parked) then take(call('HMGET', group.parked, unpack(open))) end
    end
  end
  return found
end

-- Counts first deliveries by lateness; `buckets` has one letter per message, or a space for none.
local function count_lateness(group, buckets)
  while buckets ~= '' do
    local letter, n = string.sub(buckets, 1, 1), nil
    buckets, n = string.gsub(buckets, '[' .. letter .. ']', '')
    if letter ~= ' ' then count('late:' .. letter, n, group) end
  end
end
