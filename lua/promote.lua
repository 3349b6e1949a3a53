-- promote: waiting and retry -> ready, what is due by Redis's clock, in order of due time.
-- Guarantee: never early; never more than `max_ready` unread entries in a group. With several groups,
-- messages without room in a group, or beyond this call's limit, go to that group's retry and do not
-- delay the others. A repeated call moves what became due since; only metrics depend on its count.
-- Late policies decide here, before a message is first promoted; retries have none. Of messages more
-- than RAMP_LATE_MS late, a topic with a ramp promotes only as many as the ramp allows since the last
-- call of any manager, and at most a tenth of a second's at once.
-- An entry may carry the ack timeout and the envelope of its message, so that a consumer that waits
-- for the entry need not ask for them: only in a topic with one group and few messages in its
-- stream, without ttls and journal, on a first attempt, and for a short body that the caller expected.
-- KEYS  the prelude's, then the bodies of messages that the caller expects to be due
-- ARGV  maximum messages to move in this call
-- Returns {'OK', moved, names of the full groups joined by commas, next due or '', now in ms,
--       paused 0/1, 1 if the call was cut short by its limit, promote_interval in ms,
--       messages promoted from waiting so far (0 if paused), {the ids to expect next, half as many
--       again as moved, at most 24}, id to end, ...}; {'GROUPS', ...}.
--       With several groups, the overdue retries of a full group affect neither the next due time
--       nor the cut-short flag: they wait for room. Ids past their ttl, or too late for a late
--       policy, are not moved: only a script that has their bodies' keys may end them (expire).
local changed = changed_groups()
if changed then return changed end

local now_us, now = clock()
local settings = call('HMGET', OPTIONS, 'paused', 'max_ready', 'journal', 'promote_interval', 'ack_timeout')
-- Adding 0 raises an error here, and so for this topic alone, if the option is not a number.
local interval = tonumber(settings[4] or DEFAULT.promote_interval) + 0
if settings[1] == '1' then return {'OK', 0, '', '', int(now), 1, 0, interval, 0, {}} end
if GROUP_COUNT == 0 then return {'OK', 0, '', '', int(now), 0, 0, interval, 0, {}} end
local max_ready = tonumber(settings[2] or DEFAULT.max_ready)
local limit = math.max(1, math.floor(math.min(tonumber(ARGV[ARGS + 1]), 250) / GROUP_COUNT))

-- Due ids of a sorted set as {ids, dues}; ids past their ttl, and of waiting those that are too late,
-- are collected separately.
local has_ttls = call('EXISTS', EXPIRY) == 1
local expired, is_expired, cut = {}, {}, 0

-- The ramp of a topic with a backlog: the pause between two of its messages and the instant up to
-- which the ramp is used, in us; nil without any. The instant is at most a tenth of a second old.
local ramp
local function read_ramp()
  local set = call('HMGET', OPTIONS, 'ramp', 'ramped')
  local many, per, order = string.match(set[1] or '', '^(%d+),(%d+),(%a+)$')
  if not many then return nil end
  local pause = tonumber(per) * 1000 / tonumber(many)
  local used = math.max(tonumber(set[2] or 0), now_us - math.max(pause, 100000))
  if used > now_us then used = now_us end -- the clock was set back
  return {pause = pause, used = used, is_newest_first = order == 'newest', taken = {}}
end

-- The due messages that are on time, and those of the backlog up to the ramp's budget, in order of
-- due time. Those that end need no budget.
local function due_on_ramp(is_over, may_end)
  local from = int(now - RAMP_LATE_MS)
  local found = call('ZRANGEBYSCORE', WAITING, '(' .. from, int(now), 'WITHSCORES', 'LIMIT', 0, limit)
  if #found == 2 * limit then cut = 1 end
  -- Half a microsecond more, because a pause with a fraction loses some of it in the difference.
  local budget = math.min(math.floor((now_us - ramp.used + 0.5) / ramp.pause), limit - #found / 2)
  local most = may_end and limit or budget
  local late = ramp.is_newest_first
    and call('ZRANGE', WAITING, from, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, most, 'WITHSCORES')
    or call('ZRANGEBYSCORE', WAITING, '-inf', from, 'WITHSCORES', 'LIMIT', 0, most)
  local all, taken = {}, 0
  for i = 1, #late, 2 do
    local is_ending = is_over(late[i], late[i + 1])
    if is_ending or taken < budget then
      if not is_ending then ramp.taken[late[i]], taken = true, taken + 1 end
      local at = ramp.is_newest_first and 1 or #all + 1
      table.insert(all, at, late[i])
      table.insert(all, at + 1, late[i + 1])
    end
  end
  for i = 1, #found do all[#all + 1] = found[i] end
  return all
end

local function due_of(zset, waits_for_room)
  local found = call('ZRANGEBYSCORE', zset, '-inf', int(now), 'WITHSCORES', 'LIMIT', 0, limit)
  local late, own_late, lateness = nil, nil, 0
  if zset == WAITING and found[2] then lateness = now - tonumber(found[2]) end
  if lateness >= MIN_LATE_MS then late, own_late = late_policies() end
  if lateness >= RAMP_LATE_MS then ramp = read_ramp() end

  -- Whether a message is past its ttl, or too late.
  local function is_over(id, due)
    local ends = has_ttls and call('ZSCORE', EXPIRY, id)
    if ends and tonumber(ends) <= now then return true end
    if not (late or own_late) then return false end
    return late_action(id, tonumber(due), now, late, own_late and call('HGET', POLICY, id))
  end

  if ramp and zset == WAITING then
    found = due_on_ramp(is_over, has_ttls or late or own_late)
  elseif #found == 2 * limit and not waits_for_room then
    cut = 1
  end
  local ids, dues, n = {}, {}, 0
  for i = 1, #found, 2 do
    local id = found[i]
    if is_over(id, found[i + 1]) then
      if not is_expired[id] then expired[#expired + 1] = id end
      is_expired[id] = true
    else
      n = n + 1
      ids[n], dues[n] = id, found[i + 1]
    end
  end
  return {ids = ids, dues = dues}
end

-- Merges two lists ordered by due time; `from` records the list that each id came from.
local function merge(a, b)
  local ids, dues, from, i, j = {}, {}, {}, 1, 1
  while a.ids[i] or b.ids[j] do
    local left = a.ids[i] and (not b.ids[j] or tonumber(a.dues[i]) <= tonumber(b.dues[j]))
    local k = #ids + 1
    if left then
      ids[k], dues[k], from[k], i = a.ids[i], a.dues[i], 'waiting', i + 1
    else
      ids[k], dues[k], from[k], j = b.ids[j], b.dues[j], 'retry', j + 1
    end
  end
  return ids, dues, from
end

local waiting = due_of(WAITING)
local full, is_full, moved, leaving = {}, {}, 0, {}

local function is_due(score) return score and score <= now end

-- One group's due retries, their number, and its free room. With several groups, a group without any
-- room keeps its retries: reading them in each call would delay the others. They are read only to
-- find those past their ttl.
local function wanted_by(group)
  local free = GROUP_COUNT > 1 and room(group, max_ready, limit)
  if free and free <= 0 then
    local overdue = is_due(head(group.retry)) and 1 or 0
    if overdue == 1 and has_ttls then overdue = #due_of(group.retry, true).ids end
    return {ids = {}, dues = {}}, overdue, free
  end
  local again = due_of(group.retry)
  local wanted = #waiting.ids + #again.ids
  return again, #again.ids, free or wanted > 0 and room(group, max_ready, wanted) or 0
end

-- The messages that one group takes: `retried` leave its retry; `held`, without room, move to its
-- retry. With one group, `leaving` collects the ids that leave the topic's waiting.
local function plan_for(group)
  local again, retries, free = wanted_by(group)
  local wanted = #waiting.ids + retries
  if wanted > 0 and free < math.min(wanted, limit) then
    full[#full + 1], is_full[group] = group.name, true
  end
  if retries == 0 and wanted <= math.min(free, limit) then
    if GROUP_COUNT == 1 then leaving = waiting.ids end
    return {ids = waiting.ids, dues = waiting.dues, retried = {}, held = {}}
  end
  local plan = {ids = {}, dues = {}, retried = {}, held = {}}
  local ids, dues, from = merge(waiting, again)
  for k, id in ipairs(ids) do
    if k <= free and k <= limit then
      plan.ids[k], plan.dues[k] = id, dues[k]
      if from[k] == 'retry' then
        plan.retried[#plan.retried + 1] = id
      elseif GROUP_COUNT == 1 then
        leaving[#leaving + 1] = id
      end
    elseif GROUP_COUNT > 1 and from[k] == 'waiting' then
      plan.held[#plan.held + 1] = dues[k]
      plan.held[#plan.held + 1] = id
    end
  end
  return plan
end

local plans = {}
for g, group in ipairs(groups) do
  plans[g] = plan_for(group)
  moved = moved + #plans[g].ids
end
if GROUP_COUNT > 1 then leaving = waiting.ids end

local events = {}
local function tell(group, plan, failed)
  for k, id in ipairs(plan.ids) do
    local attempt = failed and tonumber(failed[k] or 0) + 1 or 1
    events[#events + 1] = {id, 'ready', group.name, attempt, 'due', plan.dues[k]}
  end
  for k = 2, #plan.held, 2 do
    local id = plan.held[k]
    events[#events + 1] = {id, 'retry', group.name, call('HGET', group.attempts, id) or 0,
      'due', plan.held[k - 1], 'reason', 'group is full'}
  end
end

-- The envelopes that entries carry, by id.
local carried = {}
local carries = GROUP_COUNT == 1 and not has_ttls and settings[3] ~= '1'
if carries and #KEYS > ID_KEYS and call('XLEN', groups[1].ready) < BODIES_IN_ENTRIES then
  local leaves = {}
  for _, id in ipairs(leaving) do leaves[id] = true end
  for k = ID_KEYS + 1, #KEYS do
    local id = string.sub(KEYS[k], #WAITING - 1)
    local body = leaves[id] and call('GETRANGE', KEYS[k], 0, BYTES_IN_ENTRY) or ''
    if body ~= '' and #body <= BYTES_IN_ENTRY then carried[id] = body end
  end
end

if moved > 0 or #leaving > 0 then begin_freeing() end
for g, group in ipairs(groups) do
  local plan = plans[g]
  local failed = failed_attempts(group, plan.ids)
  local suspects = failed and suspects_among(group, plan.retried)
  add_ready(group, plan.ids, plan.dues, failed, suspects, carried, settings[5] or DEFAULT.ack_timeout)
  if settings[3] == '1' then tell(group, plan, failed) end
  if #plan.held > 0 then call('ZADD', group.retry, unpack(plan.held)) end
  if #plan.retried > 0 then call('ZREM', group.retry, unpack(plan.retried)) end
end
if #leaving > 0 then call('ZREM', WAITING, unpack(leaving)) end
count('promoted', #leaving)
journal(events)
if ramp and #leaving > 0 then
  for _, id in ipairs(leaving) do
    if ramp.taken[id] then ramp.used = ramp.used + ramp.pause end
  end
  call('HSET', OPTIONS, 'ramped', int(ramp.used))
end

local next_ids, next_due = {}, nil
local next_count = carries and math.max(1, math.min(math.floor(1.5 * moved), 24)) or 1
local first = call('ZRANGE', WAITING, 0, next_count - 1, 'WITHSCORES')
if first[1] then next_due = tonumber(first[2]) end
-- What the ramp holds back is due for the next call once its budget allows for a message, and not
-- before 20 ms have passed, or calls for single messages would cost more than they move.
if ramp and next_due and next_due <= now - RAMP_LATE_MS then
  first = {}
  local on_time = call('ZRANGEBYSCORE', WAITING, '(' .. int(now - RAMP_LATE_MS), '+inf', 'WITHSCORES',
    'LIMIT', 0, 1)
  next_due = math.max(now + 20, math.ceil((ramp.used + ramp.pause) / 1000))
  if on_time[1] then next_due = math.min(next_due, tonumber(on_time[2])) end
end
if carries then
  for k = 1, #first, 2 do next_ids[#next_ids + 1] = first[k] end
end
for _, group in ipairs(groups) do
  local due = head(group.retry)
  local waits_for_room = GROUP_COUNT > 1 and is_full[group] and is_due(due)
  if due and not waits_for_room and (not next_due or due < next_due) then next_due = due end
end
return {'OK', moved, table.concat(full, ','), next_due and int(next_due) or '', int(now), 0, cut, interval,
  tonumber(call('HGET', STATS, 'promoted') or 0), next_ids, unpack(expired)}
