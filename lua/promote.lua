-- promote: waiting and retry -> ready, what is due by Redis's clock, in order of due.
-- Guarantee: never early; never more than `max_ready` unread in a group; with several groups, what
-- one has no room for, or this call no step left for, goes to its own retry, so it holds up nobody.
-- KEYS  the prelude's
-- ARGV  the most messages to move in this call
-- Returns {'OK', moved, groups that are full, next due or '', now in ms, paused 0/1, 1 if the call
--       was cut short by its limit, past-ttl id, ...}; {'GROUPS', ...}. Past-ttl ids stay where
--       they are: only a script that was given their bodies' keys may end them (expire).
local changed = changed_groups()
if changed then return changed end

local _, now = clock()
local settings = call('HMGET', OPTIONS, 'paused', 'max_ready', 'journal')
if settings[1] == '1' then return {'OK', 0, 0, '', int(now), 1, 0} end
if GROUP_COUNT == 0 then return {'OK', 0, 0, '', int(now), 0, 0} end
local max_ready = tonumber(settings[2] or DEFAULT.max_ready)
local limit = math.max(1, math.floor(math.min(tonumber(ARGV[ARGS + 1]), 250) / GROUP_COUNT))

-- Due ids of a ZSET as {ids, dues}, those past their ttl set apart.
local has_ttls = call('EXISTS', EXPIRY) == 1
local expired, is_expired, cut = {}, {}, 0
local function due_of(zset)
  local found = call('ZRANGEBYSCORE', zset, '-inf', int(now), 'WITHSCORES', 'LIMIT', 0, limit)
  local ids, dues, n = {}, {}, 0
  if #found == 2 * limit then cut = 1 end
  for i = 1, #found, 2 do
    local id = found[i]
    local ends = has_ttls and call('ZSCORE', EXPIRY, id)
    if ends and tonumber(ends) <= now then
      if not is_expired[id] then expired[#expired + 1] = id end
      is_expired[id] = true
    else
      n = n + 1
      ids[n], dues[n] = id, found[i + 1]
    end
  end
  return {ids = ids, dues = dues}
end

-- Two lists in order of due become one; `from` remembers which list an id came from.
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
local full, moved, leaving = 0, 0, {}

-- What one group takes: `retried` leaves its retry, and `held`, for which there was no room, goes
-- there. With one group, `leaving` collects what leaves the topic's waiting.
local function plan_for(group)
  local again = due_of(group.retry)
  local wanted = #waiting.ids + #again.ids
  local free = wanted > 0 and room(group, max_ready, wanted) or 0
  if free < math.min(wanted, limit) then full = full + 1 end
  if #again.ids == 0 and wanted <= math.min(free, limit) then
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

if moved > 0 or #leaving > 0 then begin_freeing() end
for g, group in ipairs(groups) do
  local plan = plans[g]
  local failed = failed_attempts(group, plan.ids)
  add_ready(group, plan.ids, plan.dues, failed)
  if settings[3] == '1' then tell(group, plan, failed) end
  if #plan.held > 0 then call('ZADD', group.retry, unpack(plan.held)) end
  if #plan.retried > 0 then call('ZREM', group.retry, unpack(plan.retried)) end
end
if #leaving > 0 then call('ZREM', WAITING, unpack(leaving)) end
count('promoted', #leaving)
journal(events)

local next_due = head(WAITING)
for _, group in ipairs(groups) do
  local retry_head = head(group.retry)
  if retry_head and (not next_due or retry_head < next_due) then next_due = retry_head end
end
return {'OK', moved, full, next_due and int(next_due) or '', int(now), 0, cut, unpack(expired)}
