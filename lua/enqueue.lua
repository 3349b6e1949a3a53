-- enqueue: new -> waiting, or straight to ready.
-- Guarantee: an id is live at most once; a repeated call (same send token) adds nothing and returns
-- the first answer; a batch that exceeds the capacity writes nothing.
-- KEYS  the prelude's, then by columns for each message: body, done (for ids generated for this
--       call, only the first message's)
-- ARGV  the layout's number, as known to the caller ('' to skip the check; negative for an older
--       shard, which that layout has closed to new messages); send token;
--       on_duplicate (keep, keep_live, replace, update, reject); what is known of the ids (new:
--       generated for this call, distinct, any; known: act only on ids known here); n; the number of
--       dues (n, or 1 for all); n each of due ('+ms' is a delay, else epoch ms), envelope;
--       the number of ttls, then pairs of message number and ttl in ms;
--       the number of messages with own policies, then pairs of message number and policies;
--       the topic's window by which dues were chosen (absent to skip the check)
-- Returns {'OK', outcomes}, one letter per message: a accepted, d duplicate, r replaced, f replaced in
--       flight, b body updated and due time kept, x rejected; for known: u unknown here, s settled here
--       and to be replaced in its new shard; {'WINDOW', window} if the topic has another window;
--       {'FULL', live, capacity}; {'LARGE', message number, size, limit}; {'SHARDS'} if the shard follows
--       another layout; {'GROUPS', ...}
local token, mode, kind = ARGV[ARGS + 2], ARGV[ARGS + 3], ARGV[ARGS + 4]
local is_replacing = mode == 'replace' or mode == 'update' or mode == 'keep_live'
local n, due_count = tonumber(ARGV[ARGS + 5]), tonumber(ARGV[ARGS + 6])
local DUES = ARGS + 6
local ENVELOPES = DUES + due_count
local EXTRAS = ENVELOPES + n
local DONES = ID_KEYS + n
local settings = call('HMGET', OPTIONS, 'capacity', 'max_body_bytes', 'paused', 'max_ready',
  'journal', 'accepts', 'window')
local believed, accepts = ARGV[ARGS + 1], settings[6] or '0'
if believed ~= '' and believed ~= accepts then return {'SHARDS'} end
local _, now, now_up = clock()
local function due_of(spec)
  local at = tonumber(spec)
  if string.byte(spec) ~= 43 then return at end
  return at == 0 and now or now_up + at
end

-- New ids for later concern no group yet, unless live messages must be counted.
local common = due_count == 1 and due_of(ARGV[DUES + 1])
if kind ~= 'new' or settings[1] or not common or common <= now then
  local changed = changed_groups()
  if changed then return changed end
end

local POLICIES = EXTRAS + 2 + 2 * tonumber(ARGV[EXTRAS + 1])
local window = ARGV[POLICIES + 1 + 2 * tonumber(ARGV[POLICIES])]
if window and window ~= (settings[7] or '') and kind ~= 'known' then return {'WINDOW', settings[7] or ''} end

local limit = tonumber(settings[2] or DEFAULT.max_body_bytes)
local from = #WAITING - 1 -- where ids begin in the keys of bodies: 'body:' for 'waiting'
local sub = string.sub
local ids, both = {}, {}
for i = 1, n do
  local body, envelope = KEYS[ID_KEYS + i], ARGV[ENVELOPES + i]
  if #envelope - 15 > limit then
    local size = #envelope - 15 - (tonumber(sub(envelope, 12, 15), 16) or 0)
    if size > limit then return {'LARGE', i, size, limit} end
  end
  ids[i] = sub(body, from)
  both[2 * i - 1], both[2 * i] = body, envelope
end

local capacity = tonumber(settings[1] or '')
if capacity and kind ~= 'known' then
  -- How many live ids this call would add. An id counts once; a recently settled id counts only if
  -- it is to be replaced by another call. Ids generated for this call are all new, or the call is a
  -- repeat.
  local function count_new()
    if kind == 'new' then return call('EXISTS', unpack(KEYS, ID_KEYS + 1)) > 0 and 0 or n end
    local new, counted = 0, {}
    for i = 1, n do
      if not counted[ids[i]] and call('EXISTS', KEYS[ID_KEYS + i]) == 0 then
        local settled = call('GETRANGE', KEYS[DONES + i], 0, 7)
        if settled == '' or (is_replacing and settled ~= token) then new = new + 1 end
        counted[ids[i]] = true
      end
    end
    return new
  end
  local held = 0
  for _, group in ipairs(groups) do
    held = math.max(held, call('HLEN', group.entries) + call('ZCARD', group.retry))
  end
  local live = call('ZCARD', WAITING) + held
  if live + n > capacity then
    local new = count_new()
    if new > 0 and live + new > capacity then return {'FULL', live, capacity} end
  end
end

-- Most batches are all new: one command checks and writes. (MSETNX uses the last of equal keys.)
local accepted, outcomes = nil, string.rep('a', n) -- nil for all of them
local kept = {} -- the due times of updated messages, by message number
if kind == 'any' or kind == 'known' or call('EXISTS', unpack(KEYS, DONES + 1)) > 0
  or call('MSETNX', unpack(both)) == 0 then
  if kind == 'new' then return {'OK', outcomes} end

  -- Whether a message that has a body is in garbage, and no group will deliver it.
  local function is_dead(id)
    if call('ZSCORE', WAITING, id) then return false end
    local dead = false
    for _, group in ipairs(groups) do
      if call('HEXISTS', group.entries, id) == 1 or call('ZSCORE', group.retry, id) then return false end
      dead = dead or call('ZSCORE', group.garbage, id)
    end
    return dead
  end

  -- When a message is handed out next that no consumer holds, and that no group has ended; else nil.
  local function due_before(id, body)
    local due = tonumber(call('ZSCORE', WAITING, id) or '')
    if due or why_not_taken_back(id, body, true) then return due end
    for _, group in ipairs(groups) do
      local entry = call('HGET', group.entries, id)
      local at = tonumber(entry and field(read_entry(group, entry) or {}, 'due')
        or call('ZSCORE', group.retry, id) or '')
      if at and (not due or at < due) then due = at end
    end
    return due
  end

  -- Writes one body. Gives the message's outcome, and whether it is to be scheduled. An id
  -- given twice in one call is its own duplicate; the first mark is kept, so that a repeat returns
  -- the same outcomes.
  local seen, replayed = {}, {}
  local function write_one(i)
    local id, body, done, envelope = ids[i], both[2 * i - 1], KEYS[DONES + i], both[2 * i]
    local live = fence(body)
    local known = live
    if live == '' then known = call('GETRANGE', done, 0, 8) end
    if known == '' then
      if kind == 'known' then return 'u', false end
      call('SET', body, envelope)
      return 'a', true
    end
    local mark, same = sub(known, 9, 9), sub(known, 1, 8) == token
    if same and not seen[id] then
      replayed[id] = true
      local first = string.lower(mark)
      return string.find(first, '^[rfb]') and first or 'a', false
    end
    if mode == 'keep' then return 'd', false end
    if mode == 'keep_live' and live ~= '' and not is_dead(id) then return 'd', false end
    if mode == 'reject' then return 'x', false end
    if live == '' and kind == 'known' then return 's', false end
    local letter = 'r'
    if mode == 'update' then
      if same then
        letter, kept[i] = 'b', kept[seen[id]] or ARGV[DUES + (common and 1 or seen[id])]
      elseif live ~= '' then
        kept[i] = due_before(id, body)
        if kept[i] then letter, kept[i] = 'b', int(kept[i]) end
      end
    end
    if replayed[id] then return letter, false end
    call('SET', body, sub(envelope, 1, 9) .. (same and mark or letter) .. sub(envelope, 11))
    if live == '' then call('DEL', done) end
    for _, group in ipairs(groups) do
      local _, held = take_out(group, id)
      if held then letter = 'f' end
    end
    if letter == 'f' then call('SETRANGE', body, 9, 'f') end
    call('HDEL', POLICY, id)
    call('ZREM', EXPIRY, id)
    return letter, true
  end

  local letters = {}
  accepted = {}
  for i = 1, n do
    local id, is_new = ids[i], nil
    letters[i], is_new = write_one(i)
    if is_new then
      -- A later message with the same id in this call replaces this one.
      if seen[id] then
        for p, earlier in ipairs(accepted) do
          if earlier == seen[id] then table.remove(accepted, p) break end
        end
      end
      accepted[#accepted + 1] = i
    end
    seen[id] = i
  end
  outcomes = table.concat(letters)
  local _, duplicates = string.gsub(outcomes, 'd', '')
  count('duplicate', duplicates)
  if #accepted == 0 then return {'OK', outcomes} end
end

local waiting_head = head(WAITING)

-- Due times by message number; messages that wait; messages that go straight to ready.
local due, later, earliest = {}, {}, nil
local straight_ids, straight_dues, s = {}, {}, 0
-- Whether all messages are new and wait until a given time, as most batches do.
local function all_wait()
  if accepted or common then return false end
  earliest = math.huge
  for i = 1, n do
    local spec = ARGV[DUES + i]
    local at = tonumber(spec)
    if at <= now or string.byte(spec) == 43 then return false end
    later[2 * i - 1], later[2 * i], due[i] = spec, ids[i], at
    if at < earliest then earliest = at end
  end
  return true
end
if common and common > now and not accepted then
  local text = int(common)
  for i = 1, n do later[2 * i - 1], later[2 * i], due[i] = text, ids[i], common end
  earliest = common
elseif not all_wait() then
  due, later, earliest = {}, {}, nil
  if not accepted then
    accepted = {}
    for i = 1, n do accepted[i] = i end
  end
  local read, written, ready, oldest = {}, {}, 0, now -- many messages of a call share a due time
  local ordered, previous = true, nil
  for _, i in ipairs(accepted) do
    local spec = kept[i] or ARGV[DUES + (common and 1 or i)]
    local at = read[spec]
    if not at then
      at = due_of(spec)
      read[spec], written[at] = at, int(at)
    end
    due[i] = at
    if at <= now then ready = ready + 1 end
    if at < oldest then oldest = at end
    ordered = ordered and (not previous or previous <= at)
    previous = at
  end

  -- Straight to ready only if no due message would be overtaken.
  local free = ready
  if GROUP_COUNT == 0 or settings[3] == '1' or (waiting_head and waiting_head <= now) then
    free = 0
  end
  -- Promote applies late policies and ramps.
  if free > 0 and now - oldest >= MIN_LATE_MS then
    local policies = call('HMGET', OPTIONS, 'late', 'ramp')
    if policies[1] or policies[2] then free = 0 end
    local at = EXTRAS + 2 + 2 * tonumber(ARGV[EXTRAS + 1])
    for p = 1, tonumber(ARGV[at]) do
      if string.find(ARGV[at + 2 * p], ';', 1, true) then free = 0 end
    end
  end
  for _, group in ipairs(groups) do
    local retry_head = free > 0 and head(group.retry)
    if retry_head and retry_head <= now then free = 0 end
    if free > 0 then
      free = math.min(free, room(group, tonumber(settings[4] or DEFAULT.max_ready), ready))
    end
  end
  if not ordered and free > 0 then
    table.sort(accepted, function(a, b)
      if due[a] ~= due[b] then return due[a] < due[b] end
      return a < b
    end)
  end
  local l = 0
  for _, i in ipairs(accepted) do
    local at = due[i]
    if at <= now and s < free then
      s = s + 1
      straight_ids[s], straight_dues[s] = ids[i], written[at]
    else
      later[l + 1], later[l + 2] = written[at], ids[i]
      l = l + 2
      if not earliest or at < earliest then earliest = at end
    end
  end
  for _, group in ipairs(groups) do add_ready(group, straight_ids, straight_dues) end
  if s > 0 then
    if string.find(outcomes, '[rfb]') then call('ZREM', WAITING, unpack(straight_ids)) end
    count('promoted', s)
  end
end
if earliest then call('ZADD', WAITING, unpack(later)) end

local at = EXTRAS + 1
local ttls = tonumber(ARGV[at])
for t = 1, ttls do
  local i = tonumber(ARGV[at + 2 * t - 1])
  if due[i] then call('ZADD', EXPIRY, int(due[i] + tonumber(ARGV[at + 2 * t])), ids[i]) end
end
at = at + 2 * ttls + 1
for p = 1, tonumber(ARGV[at]) do
  local i = tonumber(ARGV[at + 2 * p - 1])
  if due[i] then put_policy(ids[i], ARGV[at + 2 * p]) end
end

count('sent', accepted and #accepted or n)
if settings[5] == '1' then
  local events, has_ttls, has_policies = {}, ttls > 0, tonumber(ARGV[at]) > 0
  local function tell(i)
    local id = ids[i]
    local event = {id, string.sub(outcomes, i, i) == 'a' and 'sent' or 'replaced', '', 0,
      'due', int(due[i]), 'envelope', both[2 * i]}
    local expires = has_ttls and call('ZSCORE', EXPIRY, id)
    if expires then event[9], event[10] = 'expires', int(tonumber(expires)) end
    local policy = has_policies and call('HGET', POLICY, id)
    if policy then event[#event + 1], event[#event + 2] = 'policy', policy end
    events[#events + 1] = event
  end
  if accepted then
    for _, i in ipairs(accepted) do tell(i) end
  else
    for i = 1, n do tell(i) end
  end
  for _, group in ipairs(groups) do
    for k = 1, s do events[#events + 1] = {straight_ids[k], 'ready', group.name, 1, 'due', straight_dues[k]} end
  end
  journal(events)
end
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
return {'OK', outcomes}
