-- schedule: changes a schedule and its occurrences: new -> waiting; waiting, ready -> settled (cancelled).
-- Guarantee: compares and sets. Nothing changes unless the schedule is as its caller saw it, so of many
-- managers at a tick one creates the occurrence. An id that is known is never created again. A repeated
-- call returns the first answer. At maxmemory a call that adds messages changes nothing.
-- KEYS  the prelude's, the call's record among them; schedules, ticks; then for each message to create:
--       body, done; then for each message to drop, and each earlier one: body, done
-- ARGV  the layout's number ('' to skip the check); the schedule's name; its fence ('' for none);
--       the new record ('' to remove it); when to look next ('' for never);
--       what earlier messages prevent (allow, skip, queue_one, replace_unstarted);
--       the record if they do; when to look next then;
--       1 if nothing may change unless all messages to drop are waiting;
--       the number of messages to drop; of earlier messages; n; n times due (epoch ms), envelope,
--       ttl in ms or '', '=' and its own policies (may be empty: no retries) or ''
-- Returns {'OK', what happened (changed, gone, held, done), the fence found, outcomes}, one letter per
--       message: a accepted, d known already, n not created; {'FULL', live, capacity}; {'SHARDS'};
--       {'GROUPS', ...}
local changed = answered() or misplaced(ARGV[ARGS + 1]) or changed_topic()
if changed then return changed end

local SCHEDULES, TICKS = KEYS[ID_KEYS + 1], KEYS[ID_KEYS + 2]
local name, fence_seen = ARGV[ARGS + 2], ARGV[ARGS + 3]
local record, score, overlap = ARGV[ARGS + 4], ARGV[ARGS + 5], ARGV[ARGS + 6]
local swaps = ARGV[ARGS + 9] == '1'
local drops, earlier, n = tonumber(ARGV[ARGS + 10]), tonumber(ARGV[ARGS + 11]), tonumber(ARGV[ARGS + 12])
local MESSAGES, FIELDS = ID_KEYS + 2, ARGS + 12
local DROPS = MESSAGES + 2 * n
local EARLIER = DROPS + 2 * drops
local _, now = clock()

local stored = call('HGET', SCHEDULES, name)
local found = stored and string.match(stored, '^%S+') or ''
if found ~= fence_seen then return {'OK', 'changed', found, ''} end

local replaced = {}
local function is_held()
  for i = 1, earlier do
    local body = KEYS[EARLIER + 2 * i - 1]
    local guard = overlap ~= 'allow' and fence(body) or ''
    local stage = guard ~= '' and stage_of(id_of(body), guard)
    if stage and stage ~= 'unstarted' and overlap == 'skip' then return true end
    if stage and overlap == 'queue_one' then return true end
    if stage == 'unstarted' and overlap == 'replace_unstarted' then
      replaced[#replaced + 1] = EARLIER + 2 * i - 1
    end
  end
  return false
end

-- Managers know the head of the ticks, so they are woken only if it moves forward.
local function write(value, at)
  local before = head(TICKS)
  if value == '' then call('HDEL', SCHEDULES, name) else call('HSET', SCHEDULES, name, value) end
  if at == '' then call('ZREM', TICKS, name) else call('ZADD', TICKS, at, name) end
  return at ~= '' and (not before or tonumber(at) < before)
end

if n > 0 and is_held() then
  allow_writes_at_maxmemory()
  write(ARGV[ARGS + 7], ARGV[ARGS + 8])
  local is_queued = string.find(found, 'q', 1, true) -- then the tick was counted before
  if not is_queued then count('overlapped', 1) end
  return remember({'OK', 'held', found, string.rep('n', n)})
end

-- A message that is to be replaced may have become ready meanwhile.
local freed, frees = #replaced, {}
for i = 1, drops do
  local body = KEYS[DROPS + 2 * i - 1]
  if call('ZSCORE', WAITING, id_of(body)) then
    freed, frees[body] = freed + 1, true
  elseif swaps then
    return {'OK', 'gone', found, ''}
  end
end

local settings = call('HMGET', OPTIONS, 'capacity', 'journal')
local capacity = tonumber(settings[1] or '') -- empty: unlimited
if capacity and n > 0 then
  local live = count_live()
  local grows = -freed
  for i = 1, n do
    local body, done = KEYS[MESSAGES + 2 * i - 1], KEYS[MESSAGES + 2 * i]
    if call('EXISTS', frees[body] and done or body, done) == 0 then grows = grows + 1 end
  end
  if grows > 0 and live + grows > capacity then return {'FULL', live, capacity} end
end

if n > freed then
  -- At maxmemory the server refuses this first write, and so the new messages.
  call('HSET', SCHEDULES, name, record == '' and stored or record)
else
  allow_writes_at_maxmemory()
end
local events = {}
local waiting_head, earliest = head(WAITING), nil

-- A dropped message leaves no tombstone, because a later change may create the same id again.
local dropped = 0
for i = 1, drops do
  local body = KEYS[DROPS + 2 * i - 1]
  local id = id_of(body)
  if call('ZREM', WAITING, id) == 1 then
    for _, group in ipairs(groups) do forget_failures(group, {id}) end
    call('UNLINK', body)
    call('HDEL', POLICY, id)
    call('ZREM', EXPIRY, id)
    list_by_key({id}, false)
    dropped = dropped + 1
    events[#events + 1] = {id, 'cancelled', '', 0, 'end', 1}
  end
end

local ids, bodies, dones, stones = {}, {}, {}, {}
for i, k in ipairs(replaced) do
  local id = id_of(KEYS[k])
  ids[i], bodies[i], dones[i] = id, KEYS[k], KEYS[k + 1]
  local due = call('ZSCORE', WAITING, id)
  stones[i] = tombstone(fence(KEYS[k]), 'cancelled', due and int(tonumber(due)), 0, now)
  call('ZREM', WAITING, id)
  for _, group in ipairs(groups) do take_out(group, id) end
  events[#events + 1] = {id, 'cancelled', '', 0, 'end', 1}
end
finish(ids, bodies, dones, stones)
count('cancelled', dropped + #replaced)

local letters, created = {}, {}
for i = 1, n do
  local body, done = KEYS[MESSAGES + 2 * i - 1], KEYS[MESSAGES + 2 * i]
  local due, envelope, ttl, policy = unpack(ARGV, FIELDS + 4 * i - 3, FIELDS + 4 * i)
  local id = id_of(body)
  if call('EXISTS', body, done) > 0 then
    letters[i] = 'd'
  else
    call('SET', body, envelope)
    call('ZADD', WAITING, due, id)
    local ends = ttl ~= '' and tonumber(due) + tonumber(ttl)
    local own = policy ~= '' and string.sub(policy, 2)
    if ends then call('ZADD', EXPIRY, int(ends), id) end
    if own then put_policy(id, own) end
    events[#events + 1] = sending(id, 'sent', due, envelope, ends, own)
    earliest = math.min(earliest or tonumber(due), tonumber(due))
    letters[i], created[#created + 1] = 'a', id
  end
end
local is_earlier = write(record, score)
list_by_key(created, true)
if has_lanes() then number_sends(created) end
count('sent', #created)
if settings[2] == '1' then journal(events) end
if is_earlier or earliest and (not waiting_head or earliest < waiting_head) then wake() end
return remember({'OK', 'done', found, table.concat(letters)})
