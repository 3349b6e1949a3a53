-- enqueue: new -> waiting, or straight to ready.
-- Guarantee: an id is live at most once; a repeated call (same send token) adds nothing and is
-- answered as the first time; a batch that exceeds the capacity writes nothing.
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  send token; on_duplicate (keep, replace, reject); 1 if all ids differ, else 0; n;
--       n times id, due ('+ms' is a delay, else epoch ms), envelope;
--       the number of ttls, then pairs of message number and ttl in ms;
--       the number of own retry policies, then pairs of message number and policy
-- Returns {'OK', outcomes}, one letter a message: a accepted, d duplicate, r replaced, x rejected;
--       {'FULL', live, capacity}; {'LARGE', message number, size, limit}; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local token, mode, distinct = ARGV[ARGS + 1], ARGV[ARGS + 2], ARGV[ARGS + 3] == '1'
local n, first = tonumber(ARGV[ARGS + 4]), ARGS + 4
local ids, bodies, dones, envelopes = {}, {}, {}, {}
for i = 1, n do
  ids[i], envelopes[i] = ARGV[first + 3 * i - 2], ARGV[first + 3 * i]
  bodies[i], dones[i] = KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
end
local settings = call('HMGET', OPTIONS, 'capacity', 'max_body_bytes', 'paused', 'max_ready')

local limit = tonumber(settings[2] or DEFAULT.max_body_bytes)
for i = 1, n do
  local size = #envelopes[i] - 15 - (tonumber(string.sub(envelopes[i], 12, 15), 16) or 0)
  if size > limit then return {'LARGE', i, size, limit} end
end

-- How many ids this call would bring to life: an id counts once, and one that was settled lately
-- only if it is to be replaced, and not by a replay.
local function count_new()
  local new, counted = 0, {}
  for i = 1, n do
    if not counted[ids[i]] and call('EXISTS', bodies[i]) == 0 then
      local settled = call('GETRANGE', dones[i], 0, 7)
      if settled == '' or (mode == 'replace' and settled ~= token) then new = new + 1 end
      counted[ids[i]] = true
    end
  end
  return new
end

local capacity = tonumber(settings[1] or '')
if capacity then
  local held = 0
  for _, group in ipairs(groups) do
    held = math.max(held, call('HLEN', group.entries) + call('ZCARD', group.retry))
  end
  local live = call('ZCARD', WAITING) + held
  if live + n - call('EXISTS', unpack(bodies)) > capacity then
    local new = count_new()
    if new > 0 and live + new > capacity then return {'FULL', live, capacity} end
  end
end

-- Most batches are all new: one command tells and writes.
local function write_all_new()
  if not distinct or call('EXISTS', unpack(dones)) > 0 then return false end
  local pairs_ = {}
  for i = 1, n do pairs_[2 * i - 1], pairs_[2 * i] = bodies[i], envelopes[i] end
  return call('MSETNX', unpack(pairs_)) == 1
end

-- The outcome of one message, its body written if it is to be placed. An id that comes twice in
-- one call is a duplicate of itself; the mark of the first stays, so that a replay tells the same.
local seen, replayed = {}, {}
local function write_one(i)
  local live = fence(bodies[i])
  local known = live
  if live == '' then known = call('GETRANGE', dones[i], 0, 8) end
  if known == '' then
    call('SET', bodies[i], envelopes[i])
    return 'a', true
  end
  local mark, same = string.sub(known, 9, 9), string.sub(known, 1, 8) == token
  if same and not seen[ids[i]] then
    replayed[ids[i]] = true
    return (mark == 'r' or mark == 'R') and 'r' or 'a', false
  end
  if mode == 'keep' then return 'd', false end
  if mode == 'reject' then return 'x', false end
  if replayed[ids[i]] then return 'r', false end
  if not same then mark = 'r' end
  call('SET', bodies[i], string.sub(envelopes[i], 1, 9) .. mark .. string.sub(envelopes[i], 11))
  if live == '' then call('DEL', dones[i]) end
  for _, group in ipairs(groups) do take_out(group, ids[i]) end
  call('HDEL', POLICY, ids[i])
  call('ZREM', EXPIRY, ids[i])
  return 'r', true
end

local outcomes, placed = nil, {}
if write_all_new() then
  outcomes = string.rep('a', n)
  for i = 1, n do placed[i] = i end
else
  local letters = {}
  for i = 1, n do
    local place
    letters[i], place = write_one(i)
    if place then
      -- A later message of the same call and id replaces this one.
      if seen[ids[i]] then
        for p, earlier in ipairs(placed) do
          if earlier == seen[ids[i]] then table.remove(placed, p) break end
        end
      end
      placed[#placed + 1] = i
    end
    seen[ids[i]] = i
  end
  outcomes = table.concat(letters)
end
if #placed == 0 then
  local _, duplicates = string.gsub(outcomes, 'd', '')
  count('duplicate', duplicates)
  return {'OK', outcomes}
end

local _, now, now_up = clock()
local due, is_placed, earliest, ordered = {}, {}, nil, true
local read, written = {}, {} -- many messages of a call share a due time
local previous = nil
for _, i in ipairs(placed) do
  local spec = ARGV[first + 3 * i - 1]
  local at = read[spec]
  if not at then
    at = tonumber(spec)
    if string.byte(spec) == 43 then at = at == 0 and now or now_up + at end
    read[spec], written[at] = at, int(at)
  end
  due[i] = at
  is_placed[i] = true
  ordered = ordered and (not previous or previous <= due[i])
  previous = due[i]
end

-- Straight to ready only where nothing would be overtaken.
local waiting_head = head(WAITING)
local free = 0
if GROUP_COUNT > 0 and settings[3] ~= '1' and not (waiting_head and waiting_head <= now) then
  free = n
  for _, group in ipairs(groups) do
    local retry_head = head(group.retry)
    if retry_head and retry_head <= now then free = 0 end
    if free > 0 then
      local max_ready = tonumber(settings[4] or DEFAULT.max_ready)
      free = math.min(free, room(group, max_ready, n))
    end
  end
end
if not ordered and free > 0 then
  table.sort(placed, function(a, b)
    if due[a] ~= due[b] then return due[a] < due[b] end
    return a < b
  end)
end

local straight_dues, straight_ids, later, l = {}, {}, {}, 0
for _, i in ipairs(placed) do
  local at = due[i]
  if at <= now and #straight_ids < free then
    straight_ids[#straight_ids + 1] = ids[i]
    straight_dues[#straight_dues + 1] = written[at]
  else
    later[l + 1], later[l + 2] = written[at], ids[i]
    l = l + 2
    if not earliest or at < earliest then earliest = at end
  end
end
if #later > 0 then call('ZADD', WAITING, unpack(later)) end
for _, group in ipairs(groups) do add_ready(group, straight_ids, straight_dues) end
if #straight_ids > 0 and string.find(outcomes, 'r', 1, true) then
  call('ZREM', WAITING, unpack(straight_ids))
end

local at = first + 3 * n + 1
local ttls = tonumber(ARGV[at])
for t = 1, ttls do
  local i = tonumber(ARGV[at + 2 * t - 1])
  if is_placed[i] then
    call('ZADD', EXPIRY, int(due[i] + tonumber(ARGV[at + 2 * t])), ids[i])
  end
end
at = at + 2 * ttls + 1
for p = 1, tonumber(ARGV[at]) do
  local i = tonumber(ARGV[at + 2 * p - 1])
  if is_placed[i] then call('HSET', POLICY, ids[i], ARGV[at + 2 * p]) end
end

count('sent', #placed)
count('promoted', #straight_ids)
local _, duplicates = string.gsub(outcomes, 'd', '')
count('duplicate', duplicates)
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
return {'OK', outcomes}
