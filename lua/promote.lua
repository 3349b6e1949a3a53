-- promote: waiting and retry -> ready, what is due by Redis's clock, in order of due time.
-- Guarantee: never early; never more than `max_ready` unread entries in a group. With several groups,
-- messages without room in a group, or beyond this call's limit, go to that group's retry and do not
-- delay the others. A repeated call moves what became due since; only metrics depend on its count.
-- Late policies decide here, before a message is first promoted; retries have none. Of messages more
-- than RAMP_LATE_MS late, a topic with a ramp promotes only as many as the ramp allows since the last
-- call of any manager, and at most a tenth of a second's at once.
-- The entry of a message that the caller expected may carry its envelope, so that a waiting consumer need
-- not ask for it. Bodies of other ids are not read, because a caller has to name all keys.
-- Features: retries, ttl, late, ramp, journal.
-- KEYS  the prelude's, then the bodies of messages that are expected to be due
-- ARGV  maximum messages to move in this call
-- Returns {'OK', moved, names of the full groups joined by commas, next due or '', now in ms,
--       paused 0/1, 1 if the call was cut short by its limit, promote_interval in ms,
--       messages promoted from waiting so far (0 if paused), {id to expect next, ...}, id to end, ...};
--       {'GROUPS', ...}; {'FEATURES', ...}. With several groups, the overdue retries of a full group
--       affect neither the next due time nor the cut-short flag: they wait for room. Ids past their ttl,
--       or too late for a late policy, are not moved: only a script that has their bodies' keys may end
--       them (expire).
local most = tonumber(ARGV[ARGS + 1])

local changed = changed_groups()
if changed then return changed end

local now_us, now = clock()
local settings = call('HMGET', OPTIONS, 'paused', 'max_ready', 'promote_interval', 'journal', 'ack_timeout',
  'lanes')
-- Adding 0 raises an error here, and so for this topic alone, if the option is not a number.
local interval = tonumber(settings[3] or DEFAULT.promote_interval) + 0
local paused = settings[1] == '1' and 1 or 0
if paused == 1 or GROUP_COUNT == 0 then return {'OK', 0, '', '', now, paused, 0, interval, 0, {}} end
local max_ready = tonumber(settings[2] or DEFAULT.max_ready)
local limit = math.max(1, math.floor(math.min(most, 250) / GROUP_COUNT))

local found = call('ZRANGEBYSCORE', WAITING, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
local lateness = found[2] and now - tonumber(found[2]) or 0
local cut = #found == 2 * limit and 1 or 0

if USES.lanes then
  lanes_in_use = settings[6] == '1'
else
  if settings[6] == '1' then return {'FEATURES', 'lanes'} end
end
if not USES.journal then
  if settings[4] == '1' then return {'FEATURES', 'journal'} end
end
if not USES.ttl or not USES.retries then
  local retry, attempts = groups[1].retry, groups[1].attempts
  if call('EXISTS', EXPIRY, retry, attempts) > 0 then
    if not USES.ttl then
      if call('EXISTS', EXPIRY) == 1 then return {'FEATURES', 'ttl'} end
    end
    if not USES.retries then
      if call('EXISTS', retry, attempts) > 0 then return {'FEATURES', 'retries'} end
    end
  end
end
if not USES.late or not USES.ramp then
  if lateness >= MIN_LATE_MS then
    local set = call('HMGET', OPTIONS, 'late', 'own_late', 'ramp')
    if not USES.late then
      if set[1] or set[2] then return {'FEATURES', 'late'} end
    end
    if not USES.ramp then
      if set[3] then return {'FEATURES', 'ramp'} end
    end
  end
end

-- The ids that are past their ttl, or too late; the ids in waiting that a ramp lets through.
local to_end, is_ending, ramped

local has_ttls = USES.ttl and call('EXISTS', EXPIRY) == 1
local topics_late, may_be_own
if USES.late then
  if lateness >= MIN_LATE_MS then topics_late, may_be_own = late_policies() end
end

-- Whether a message is past its ttl, or too late while it waits.
local function is_over(id, due, waits)
  local ends = has_ttls and call('ZSCORE', EXPIRY, id)
  if ends and tonumber(ends) <= now then return true end
  if USES.late then
    if waits and (topics_late or may_be_own) then
      local own = may_be_own and call('HGET', POLICY, id)
      if late_action(id, tonumber(due), now, topics_late, own) then return true end
    end
  end
  return false
end

-- The ramp of a topic with a backlog: the pause between two of its messages and the instant up to
-- which the ramp is used, in us; nil without any. The instant is at most a tenth of a second old.
local function read_ramp()
  local set = call('HMGET', OPTIONS, 'ramp', 'ramped')
  local many, per, order = string.match(set[1] or '', '^(%d+),(%d+),(%a+)$')
  if not many then return nil end
  local pause = tonumber(per) * 1000 / tonumber(many)
  local used = math.max(tonumber(set[2] or 0), now_us - math.max(pause, 100000))
  if used > now_us then used = now_us end -- the clock was set back
  return {pause = pause, used = used, is_newest_first = order == 'newest'}
end

-- The due messages that are on time, and those of the backlog up to the ramp's budget, in order of
-- due time. Those that end need no budget.
local function due_on_ramp(ramp)
  local from = int(now - RAMP_LATE_MS)
  local on_time = call('ZRANGEBYSCORE', WAITING, '(' .. from, int(now), 'WITHSCORES', 'LIMIT', 0, limit)
  cut = #on_time == 2 * limit and 1 or 0
  -- Half a microsecond more, because a pause with a fraction loses some of it in the difference.
  local budget = math.min(math.floor((now_us - ramp.used + 0.5) / ramp.pause), limit - #on_time / 2)
  local may_end = has_ttls or topics_late or may_be_own
  local read = may_end and limit or budget
  local late = ramp.is_newest_first
    and call('ZRANGE', WAITING, from, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, read, 'WITHSCORES')
    or call('ZRANGEBYSCORE', WAITING, '-inf', from, 'WITHSCORES', 'LIMIT', 0, read)
  local all, taken = {}, 0
  for i = 1, #late, 2 do
    local ends = is_over(late[i], late[i + 1], true)
    if ends or taken < budget then
      if not ends then ramped[late[i]], taken = true, taken + 1 end
      local at = ramp.is_newest_first and 1 or #all + 1
      table.insert(all, at, late[i])
      table.insert(all, at + 1, late[i + 1])
    end
  end
  for i = 1, #on_time do all[#all + 1] = on_time[i] end
  return all
end

local ramp
if USES.ramp then
  ramp, ramped = lateness >= RAMP_LATE_MS and read_ramp(), {}
  if ramp then found = due_on_ramp(ramp) end
end

-- Those of some pairs of an id and its due time that do not end.
local function without_ending(pairs, waits)
  local kept = {}
  for k = 1, #pairs, 2 do
    local id, due = pairs[k], pairs[k + 1]
    if not is_over(id, due, waits) then
      kept[#kept + 1], kept[#kept + 2] = id, due
    elseif not is_ending[id] then
      to_end[#to_end + 1], is_ending[id] = id, true
    end
  end
  return kept
end

if USES.ttl or USES.late then
  to_end, is_ending = {}, {}
  if has_ttls or topics_late or may_be_own then found = without_ending(found, true) end
end

-- The names of the groups without room, and these groups.
local full, is_full = '', nil

local function note_full(group)
  full = full == '' and group.name or full .. ',' .. group.name
  if is_full then is_full[group] = true end
end

local function is_due(score) return score and score <= now end

-- One group's due retries that do not end. More may be due than one call moves.
local function due_retries(group, can_move)
  local again = call('ZRANGEBYSCORE', group.retry, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  if can_move and #again == 2 * limit then cut = 1 end
  if has_ttls then again = without_ending(again, false) end
  return again
end

-- One group's due retries, their number, and its free room. With several groups, a group without any
-- room keeps its retries: reading them in each call would delay the others. They are read only to
-- find those past their ttl.
local function wanted_by(group)
  local free = GROUP_COUNT > 1 and room(group, max_ready, limit)
  local is_blocked = free and free <= 0
  if is_blocked and not is_due(head(group.retry)) then return {}, 0, free end
  if is_blocked and not has_ttls then return {}, 1, free end
  local again = due_retries(group, not is_blocked)
  if is_blocked then return {}, #again / 2, free end
  local wanted = (#found + #again) / 2
  return again, #again / 2, free or wanted > 0 and room(group, max_ready, wanted) or 0
end

-- The messages that one group takes from waiting and from its retry: `pairs`, in order of due time; the
-- ids that leave its retry (`retried`) and, if it is the only group, waiting (`waited`); and the pairs
-- that move to its retry because it has no room (`held`).
local function plan_with_retries(group)
  local again, retries, free = wanted_by(group)
  local wanted = #found / 2 + retries
  if wanted > 0 and free < math.min(wanted, limit) then note_full(group) end
  local plan = {pairs = {}, retried = {}, held = {}, waited = GROUP_COUNT == 1 and {} or nil}
  local taken, i, j = 0, 1, 1
  while found[i] or again[j] do
    local is_first = found[i] and (not again[j] or tonumber(found[i + 1]) <= tonumber(again[j + 1]))
    local id, due
    if is_first then
      id, due, i = found[i], found[i + 1], i + 2
    else
      id, due, j = again[j], again[j + 1], j + 2
    end
    if taken < free and taken < limit then
      taken = taken + 1
      plan.pairs[2 * taken - 1], plan.pairs[2 * taken] = id, due
      local left = plan.retried
      if is_first then left = plan.waited end
      if left then left[#left + 1] = id end
    elseif is_first and GROUP_COUNT > 1 then
      plan.held[#plan.held + 1], plan.held[#plan.held + 2] = due, id
    end
  end
  return plan
end

-- What a group's gate let through, and what of the due messages stays parked, for the journal.
local function tell_of_gate(group, due, through)
  local told, is_through = {}, {}
  for _, pairs in ipairs({through, due}) do
    for k = 1, #pairs, 2 do
      local id = pairs[k]
      if not is_through[id] then
        local attempt = tonumber(call('HGET', group.attempts, id) or 0) + 1
        told[#told + 1] = {id, pairs == due and 'parked' or 'ready', group.name, attempt, 'due', pairs[k + 1]}
        is_through[id] = true
      end
    end
  end
  journal(told)
end

-- With lanes, what is due is parked, and the group's gate lets through what it has room for.
local function pass_by_lanes(group)
  local again, retried = due_retries(group, true), {}
  will_fill(group)
  for k = 1, #again, 2 do retried[#retried + 1] = again[k] end
  park(group, found)
  park(group, again)
  if #retried > 0 then call('ZREM', group.retry, unpack(retried)) end
  local at, through = fill(group, limit, {settings[2], call('HGET', OPTIONS, 'lanes_changed')})
  if settings[4] == '1' then
    local due = {unpack(found)}
    for _, part in ipairs(again) do due[#due + 1] = part end
    tell_of_gate(group, due, through)
  end
  local retry_head = head(group.retry)
  return #through / 2, math.min(at or math.huge, retry_head or math.huge)
end

-- What each group takes, and the ids that leave waiting.
local plans, leaving, moved = nil, nil, 0

-- Without retries the only group takes what is due, as far as it has room.
local function plan_groups()
  if USES.retries then
    plans, is_full = {}, {}
    for g, group in ipairs(groups) do
      plans[g] = plan_with_retries(group)
      moved = moved + #plans[g].pairs / 2
    end
    leaving = plans[1].waited
    if GROUP_COUNT > 1 then
      leaving = {} -- a message without room leaves waiting, too, for the group's retry
      for k = 1, #found, 2 do leaving[#leaving + 1] = found[k] end
    end
  else
    moved = #found / 2
    local free = moved > 0 and math.max(0, room(groups[1], max_ready, moved)) or 0
    if free < moved then
      note_full(groups[1])
      for k = 2 * free + 1, 2 * moved do found[k] = nil end
      moved = free
    end
    leaving = sized(moved)
    for k = 1, moved do leaving[k] = found[2 * k - 1] end
  end
end

local by_lanes, gate_at = false, nil
if USES.lanes then
  if lanes_in_use then
    by_lanes, leaving = true, {}
    for k = 1, #found, 2 do leaving[#leaving + 1] = found[k] end
    allow_writes_at_maxmemory()
    for _, group in ipairs(groups) do
      local many, at = pass_by_lanes(group)
      moved, gate_at = moved + many, math.min(gate_at or at, at)
    end
  end
end
if not by_lanes then plan_groups() end

-- The envelopes that entries carry, by id, unless the topic's options make consumers ask anyway: see
-- `state_of` in core/delivery/opening.py.
local carries, carried = GROUP_COUNT == 1 and not has_ttls and settings[4] ~= '1' and not by_lanes, nil
if carries and #KEYS > ID_KEYS and #leaving > 0 and call('XLEN', groups[1].ready) < CARRIED_ENTRIES then
  carried = {}
  for _, id in ipairs(leaving) do carried[id] = false end
  for k = ID_KEYS + 1, #KEYS do
    local id = id_of(KEYS[k])
    local body = carried[id] == false and call('GETRANGE', KEYS[k], 0, CARRIED_BYTES) or ''
    if body ~= '' and #body <= CARRIED_BYTES then carried[id] = body end
  end
end

local events

local function tell(group, pairs, failed, held)
  for k = 1, #pairs, 2 do
    local attempt = failed and tonumber(failed[(k + 1) / 2] or 0) + 1 or 1
    events[#events + 1] = {pairs[k], 'ready', group.name, attempt, 'due', pairs[k + 1]}
  end
  for k = 2, #held, 2 do
    local id = held[k]
    events[#events + 1] = {id, 'retry', group.name, call('HGET', group.attempts, id) or 0,
      'due', held[k - 1], 'reason', 'group is full'}
  end
end

if USES.journal then
  events = {}
end
if not by_lanes and (#leaving > 0 or moved > 0) then allow_writes_at_maxmemory() end
for g, group in ipairs(by_lanes and {} or groups) do
  local pairs, failed, suspects, held = found, nil, nil, nil
  if USES.retries then
    local plan, ids = plans[g], {}
    pairs, held = plan.pairs, plan.held
    for k = 1, #pairs, 2 do ids[#ids + 1] = pairs[k] end
    failed = failed_attempts(group, ids)
    suspects = failed and suspects_among(group, plan.retried)
  end
  if USES.journal then
    if settings[4] == '1' then tell(group, pairs, failed, held or {}) end
  end
  add_ready(group, pairs, failed, suspects, carried, settings[5] or DEFAULT.ack_timeout)
  if USES.retries then
    local retried = plans[g].retried
    if #held > 0 then call('ZADD', group.retry, unpack(held)) end
    if #retried > 0 then call('ZREM', group.retry, unpack(retried)) end
  end
end
local total
if #leaving > 0 then
  call('ZREM', WAITING, unpack(leaving))
  total = call('HINCRBY', STATS, 'promoted', #leaving)
end
if USES.journal then
  journal(events)
end
if USES.ramp then
  if ramp and #leaving > 0 then
    for _, id in ipairs(leaving) do
      if ramped[id] then ramp.used = ramp.used + ramp.pause end
    end
    call('HSET', OPTIONS, 'ramped', int(ramp.used))
  end
end

-- What to expect next: usually as many messages become due until the next call as until this one.
local next_ids, next_due = {}, nil
if carries then
  local most_next = math.max(1, math.min(math.floor(1.5 * moved), 24))
  local first = call('ZRANGE', WAITING, 0, most_next - 1, 'WITHSCORES')
  next_due = first[2] and tonumber(first[2])
  for k = 1, #first, 2 do next_ids[#next_ids + 1] = first[k] end
else
  next_due = head(WAITING)
end
if USES.ramp then
  -- What the ramp holds back is due for the next call once its budget allows for a message, and not
  -- before 20 ms have passed, or calls for single messages would cost more than they move.
  if ramp and next_due and next_due <= now - RAMP_LATE_MS then
    local on_time = call('ZRANGEBYSCORE', WAITING, '(' .. int(now - RAMP_LATE_MS), '+inf', 'WITHSCORES',
      'LIMIT', 0, 1)
    next_due = math.max(now + 20, math.ceil((ramp.used + ramp.pause) / 1000))
    if on_time[1] then next_due = math.min(next_due, tonumber(on_time[2])) end
  end
end
if gate_at and gate_at < (next_due or math.huge) then next_due = gate_at end
if USES.retries then
  for _, group in ipairs(groups) do
    local due = head(group.retry)
    local waits_for_room = GROUP_COUNT > 1 and is_full and is_full[group] and is_due(due)
    if due and not waits_for_room and (not next_due or due < next_due) then next_due = due end
  end
end
return {'OK', moved, full, next_due and int(next_due) or '', now, 0, cut, interval,
  total or tonumber(call('HGET', STATS, 'promoted') or 0), next_ids, unpack(to_end or {})}
