-- enqueue: new -> waiting, or straight to ready.
-- Guarantee: an id is live at most once; a repeated call (same send tokens in the envelopes) adds nothing
-- and returns the first answer; a batch that exceeds the capacity, or max_per_key, writes nothing.
-- Features: now (some dues have come), ids (given by the sender; else
-- generated for this call), keys (some messages have one), capacity, max_per_key, window, ttl, policy,
-- journal.
-- KEYS  the prelude's, then by columns for each message: body, done (for ids generated for this
--       call, only the first message's)
-- ARGV  the layout's number, as known to the caller ('' to skip the check; negative for an older
--       shard, which that layout has closed to new messages);
--       on_duplicate (keep, keep_live, replace, update, reject); what is known of the ids (new:
--       generated for this call, distinct, any; known: act only on ids known here); n; the number of
--       dues (n, or 1 for all); n each of due ('+ms' is a delay, else epoch ms), envelope;
--       the number of ttls, then pairs of message number and ttl in ms;
--       the number of messages with own policies, then pairs of message number and policies;
--       the topic's window by which dues were chosen (absent to skip the check)
-- Returns {'OK', outcomes}, one letter per message: a accepted, d duplicate, r replaced, f replaced in
--       flight, b body updated and due time kept, x rejected; for known: u unknown here, s settled here
--       and to be replaced in its new shard; {'WINDOW', window} if the topic has another window;
--       {'FULL', live, capacity}; {'KEYFULL', key, live, max_per_key}; {'LARGE', message number, size, limit}; {'SHARDS'} if the shard follows
--       another layout; {'GROUPS', ...}; {'FEATURES', ...}
local believed, mode, kind = ARGV[ARGS + 1], ARGV[ARGS + 2], ARGV[ARGS + 3]
local n, due_count = tonumber(ARGV[ARGS + 4]), tonumber(ARGV[ARGS + 5])
local DUES = ARGS + 5
local ENVELOPES = DUES + due_count
local TTLS = ENVELOPES + n + 1
local POLICIES = TTLS + 1 + 2 * tonumber(ARGV[TTLS])
local DONES = ID_KEYS + n

local settings = call('HMGET', OPTIONS, 'accepts', 'max_body_bytes', 'capacity', 'journal', 'lanes')
if believed ~= '' and believed ~= (settings[1] or '0') then return {'SHARDS'} end
if not USES.capacity then
  if settings[3] then return {'FEATURES', 'capacity'} end
end
if USES.keys and not USES.max_per_key then
  if call('HEXISTS', OPTIONS, 'max_per_key') == 1 then return {'FEATURES', 'max_per_key'} end
end
if not USES.journal then
  if settings[4] == '1' then return {'FEATURES', 'journal'} end
end
if USES.lanes then
  lanes_in_use = settings[5] == '1'
else
  if settings[5] == '1' then return {'FEATURES', 'lanes'} end
end
-- New ids for later concern no group, unless live messages must be counted.
if USES.now or USES.ids or USES.capacity then
  local changed = changed_groups()
  if changed then return changed end
end
if USES.window then
  local given = ARGV[POLICIES + 1 + 2 * tonumber(ARGV[POLICIES])]
  local window = call('HGET', OPTIONS, 'window') or ''
  if given and window ~= given and kind ~= 'known' then return {'WINDOW', window} end
end

local _, now, now_up = clock()
if not USES.now then
  for k = 1, due_count do
    local given = ARGV[DUES + k]
    local is_later = string.byte(given) == 43 and given ~= '+0' or tonumber(given) > now
    if not is_later then return {'FEATURES', 'now'} end
  end
end
local limit = tonumber(settings[2] or DEFAULT.max_body_bytes)
local from = #WAITING - 1 -- where ids begin in the keys of bodies: 'body:' for 'waiting'
-- Tables that begin with their final size: one that grows costs more than some commands.
local ids, both = {unpack(KEYS, ID_KEYS + 1, ID_KEYS + n)}, {unpack(ARGV, ENVELOPES + 1, ENVELOPES + 2 * n)}
for i = 1, n do
  local body, envelope = KEYS[ID_KEYS + i], ARGV[ENVELOPES + i]
  if #envelope - 15 > limit then
    local size = #envelope - 15 - (tonumber(string.sub(envelope, 12, 15), 16) or 0)
    if size > limit then return {'LARGE', i, size, limit} end
  end
  ids[i], both[2 * i - 1], both[2 * i] = string.sub(body, from), body, envelope
end

local function token_of(i) return string.sub(ARGV[ENVELOPES + i], 2, 9) end

-- The live ids that this call would add. An id counts once; a recently settled id counts only if it is to
-- be replaced by another call. Ids generated for this call are all new, or the call is a repeat.
local function new_ids()
  if kind == 'new' then return call('EXISTS', unpack(KEYS, ID_KEYS + 1)) > 0 and {} or ids end
  local is_replacing = mode == 'replace' or mode == 'update' or mode == 'keep_live'
  local new, counted = {}, {}
  for i = 1, n do
    if not counted[ids[i]] and call('EXISTS', KEYS[ID_KEYS + i]) == 0 then
      local settled = call('GETRANGE', KEYS[DONES + i], 0, 7)
      if settled == '' or (is_replacing and settled ~= token_of(i)) then new[#new + 1] = ids[i] end
      counted[ids[i]] = true
    end
  end
  return new
end

if USES.capacity then
  local capacity = tonumber(settings[3] or '')
  if capacity and kind ~= 'known' then
    local live = count_live()
    if live + n > capacity then
      local new = #new_ids()
      if new > 0 and live + new > capacity then return {'FULL', live, capacity} end
    end
  end
end

-- The first of some ids whose key would have more than `most` live messages with these ids: its key, and
-- how many that has now, which `live` gets for each key.
local function full_key(some, most, live)
  local added = {}
  for _, id in ipairs(some) do
    local key = split_id(id)
    if key then
      live[key], added[key] = live[key] or count_of_key(key), (added[key] or 0) + 1
      if live[key] + added[key] > most then return key, live[key] end
    end
  end
  return nil
end

if USES.keys and USES.max_per_key then
  local most = tonumber(call('HGET', OPTIONS, 'max_per_key') or '')
  if most and kind ~= 'known' then
    local known = {}
    local key, live = full_key(ids, most, known)
    if key then key, live = full_key(new_ids(), most, known) end
    if key then return {'KEYFULL', key, live, most} end
  end
end

-- Most batches are all new: one command checks and writes. (MSETNX uses the last of equal keys.)
local accepted, outcomes = nil, string.rep('a', n) -- nil for all of them
local is_new = (kind == 'new' or kind == 'distinct')
  and call('EXISTS', unpack(KEYS, DONES + 1)) == 0 and call('MSETNX', unpack(both)) == 1
if kind == 'new' and not is_new then return {'OK', outcomes} end

-- The due times of updated messages, by message number; ids written by this call, with the numbers of
-- their messages; ids of which an earlier call gave the outcome.
local kept, seen, replayed

-- Whether a message that has a body is in garbage, and no group will deliver it.
local function is_dead(id)
  if call('ZSCORE', WAITING, id) then return false end
  local dead = false
  for _, group in ipairs(groups) do
    if call('HEXISTS', group.entries, id) == 1 or call('ZSCORE', group.retry, id) then return false end
    if parked_due(group, id) then return false end
    dead = dead or call('ZSCORE', group.garbage, id)
  end
  return dead
end

-- When a message is handed out next that no consumer holds, and that no group has ended; else nil.
local function due_before(id, body)
  if not call('ZSCORE', WAITING, id) and why_not_taken_back(id, body, true) then return nil end
  return due_next(id)
end

-- Writes one body. Gives the message's outcome, and whether it is to be scheduled. An id given twice in
-- one call is its own duplicate; the first mark is kept, so that a repeat returns the same outcomes.
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
  local mark, same = string.sub(known, 9, 9), string.sub(known, 1, 8) == token_of(i)
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
      letter, kept[i] = 'b', kept[seen[id]] or ARGV[DUES + (due_count == 1 and 1 or seen[id])]
    elseif live ~= '' then
      kept[i] = due_before(id, body)
      if kept[i] then letter, kept[i] = 'b', int(kept[i]) end
    end
  end
  if replayed[id] then return letter, false end
  call('SET', body, string.sub(envelope, 1, 9) .. (same and mark or letter) .. string.sub(envelope, 11))
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

if USES.ids then
  kept, seen, replayed = {}, {}, {}
  if not is_new then
    local letters = {}
    accepted = {}
    for i = 1, n do
      local id, is_written = ids[i], nil
      letters[i], is_written = write_one(i)
      if is_written then
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
end

local waiting_head = head(WAITING)

-- Due times by message number; the messages that wait, and the earliest of these; the numbers of those
-- whose due times have come. Many messages of a call share a due time.
local due, ready, earliest, spec, at
local later, l = {unpack(KEYS, ID_KEYS + 1, ID_KEYS + 2 * n)}, 0
if USES.now or USES.ttl or USES.policy or USES.journal then
  due, ready = {}, {}
end
for k = 1, accepted and #accepted or n do
  local i = accepted and accepted[k] or k
  local given = ARGV[DUES + (due_count == 1 and 1 or i)]
  if USES.ids then
    given = kept[i] or given
  end
  if given ~= spec then
    spec, at = given, tonumber(given)
    if string.byte(given) == 43 then at = at == 0 and now or now_up + at end
  end
  if USES.now or USES.ttl or USES.policy or USES.journal then
    due[i] = at
  end
  local waits = true
  if USES.now then
    waits = at > now
    if not waits then ready[#ready + 1] = i end
  end
  if waits then
    later[l + 1], later[l + 2] = at, ids[i]
    l = l + 2
    if not earliest or at < earliest then earliest = at end
  end
end

-- How many messages whose due times have come may go straight to ready: only if no due message is
-- overtaken, and no late policy or ramp applies, which are promote's.
local function free_now()
  if #ready == 0 or GROUP_COUNT == 0 or waiting_head and waiting_head <= now then return 0 end
  if USES.lanes then
    if lanes_in_use then return 0 end
  end
  local set = call('HMGET', OPTIONS, 'paused', 'max_ready', 'late', 'ramp')
  if set[1] == '1' then return 0 end
  if now - due[ready[1]] >= MIN_LATE_MS then
    if set[3] or set[4] then return 0 end
    for p = 1, tonumber(ARGV[POLICIES]) do
      if late_part(ARGV[POLICIES + 2 * p]) then return 0 end
    end
  end
  local free = #ready
  for _, group in ipairs(groups) do
    local retry_head = head(group.retry)
    if retry_head and retry_head <= now then return 0 end
    free = math.min(free, room(group, tonumber(set[2] or DEFAULT.max_ready), #ready))
  end
  return free
end

local straight
if USES.now then
  straight = {}
  table.sort(ready, function(a, b)
    if due[a] ~= due[b] then return due[a] < due[b] end
    return a < b
  end)
  local free = free_now()
  for k, i in ipairs(ready) do
    if k <= free then
      straight[2 * k - 1], straight[2 * k] = ids[i], int(due[i])
    else
      later[l + 1], later[l + 2] = due[i], ids[i]
      l = l + 2
      earliest = math.min(earliest or due[i], due[i])
    end
  end
  if #straight > 0 then
    for _, group in ipairs(groups) do add_ready(group, straight) end
    if string.find(outcomes, '[rfb]') then
      for k = 1, #straight, 2 do call('ZREM', WAITING, straight[k]) end
    end
    count('promoted', #straight / 2)
  end
end
if l > 0 then call('ZADD', WAITING, unpack(later, 1, l)) end

if USES.ttl then
  for t = TTLS + 1, POLICIES - 2, 2 do
    local i = tonumber(ARGV[t])
    if due[i] then call('ZADD', EXPIRY, int(due[i] + tonumber(ARGV[t + 1])), ids[i]) end
  end
end
if USES.policy then
  for p = POLICIES + 1, POLICIES + 2 * tonumber(ARGV[POLICIES]), 2 do
    local i = tonumber(ARGV[p])
    if due[i] then put_policy(ids[i], ARGV[p + 1]) end
  end
end

local written = ids
if USES.keys then
  written = accepted and {} or ids
  for k, i in ipairs(accepted or {}) do written[k] = ids[i] end
  list_by_key(written, true)
end
if USES.lanes then
  if lanes_in_use then number_sends(written) end
end
count('sent', accepted and #accepted or n)
if USES.journal then
  if settings[4] == '1' then
    local events = {}
    for k = 1, accepted and #accepted or n do
      local i = accepted and accepted[k] or k
      local id = ids[i]
      local state = string.sub(outcomes, i, i) == 'a' and 'sent' or 'replaced'
      local expires, policy
      if USES.ttl then
        expires = call('ZSCORE', EXPIRY, id)
      end
      if USES.policy or USES.lanes then -- with the number of the send
        policy = call('HGET', POLICY, id)
      end
      events[#events + 1] = sending(id, state, due[i], both[2 * i], expires, policy)
    end
    for _, group in ipairs(groups) do
      for k = 1, straight and #straight / 2 or 0 do
        events[#events + 1] = {ids[ready[k]], 'ready', group.name, 1, 'due', int(due[ready[k]])}
      end
    end
    journal(events)
  end
end
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
return {'OK', outcomes}
