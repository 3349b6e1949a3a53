-- prelude: bodies, tombstones, and the end of a message.

-- How many of n bodies one call may read, at least one; their keys start at `first`, `step` apart.
-- Lengths are read before any body, so that no size can exceed the budget.
local function count_within_budget(first, step, n)
  if n == 1 then return n end
  local bytes = 0
  for i = 1, n do
    bytes = bytes + call('STRLEN', KEYS[first + (i - 1) * step])
    if bytes > BYTES_PER_CALL and i > 1 then return i - 1 end
  end
  return n
end

-- Token and mark of a live message (nine characters), or '' if it is not live.
local function fence(body) return call('GETRANGE', body, 1, 9) end

local function is_partly_settled(mark_holder)
  local mark = string.sub(mark_holder, 9, 9)
  return mark == '+' or string.find(mark, '^%u') ~= nil
end

-- Marks that one of several groups has settled the message; cancel and reschedule check this.
local function mark_partly_settled(body)
  local mark = call('GETRANGE', body, 9, 9)
  local settled = mark == '-' and '+' or string.upper(mark)
  if settled ~= mark then call('SETRANGE', body, 9, settled) end
end

local function tombstone(guard, state, due, attempts, now)
  return guard .. state .. ',' .. (due or '') .. ',' .. attempts .. ',' .. int(now)
end

-- MSETEX, which sets many keys with one expiry, exists only in recent versions of both servers.
local HAS_MSETEX = (redis.VALKEY_VERSION_NUM or 0) >= 0x090100
  or not redis.VALKEY_VERSION_NUM and (redis.REDIS_VERSION_NUM or 0) >= 0x080400

-- Sets keys, given as {key, value, key, value, ...} up to `size`, until a point in time: for a duration
-- the server would compute one per key. Falls back to SET if the user may not run MSETEX: an incomplete
-- settlement would lose the tombstones.
local function set_all(set, size, expire_at)
  if HAS_MSETEX then
    set[size + 1], set[size + 2] = 'PXAT', expire_at
    if type(redis.pcall('MSETEX', size / 2, unpack(set, 1, size + 2))) ~= 'table' then return end
  end
  for k = 1, size, 2 do call('SET', set[k], set[k + 1], 'PXAT', expire_at) end
end

-- Writes tombstones, given as {key, tombstone, ...} up to `size`. They last for the topic's retention, or
-- for `dedupe_for` if the send token begins with '~' (a job that may run again much later).
local function keep_tombstones(set, size)
  local settings, _, now = settling_options(), clock()
  local retention = tonumber(settings[2] or DEFAULT.retention)
  local lasting, kept = nil, 0
  for k = 2, size, 2 do
    if string.byte(set[k]) == 126 then
      lasting = lasting or {}
      lasting[#lasting + 1], lasting[#lasting + 2] = set[k - 1], set[k]
    else
      set[kept + 1], set[kept + 2] = set[k - 1], set[k]
      kept = kept + 2
    end
  end
  if kept > 0 and retention > 0 then set_all(set, kept, int(now + retention)) end
  if lasting then
    local span = math.max(retention, tonumber(settings[3] or DEFAULT.dedupe_for))
    set_all(lasting, #lasting, int(now + span))
    call('HSET', OPTIONS, 'lasting', int(now + span)) -- a draining shard is kept until then
  end
end

-- Forgets the policies and ttls of messages.
local function forget_policies(ids)
  call('HDEL', POLICY, unpack(ids))
  call('ZREM', EXPIRY, unpack(ids))
end

-- Settles messages for good: deletes bodies and writes tombstones.
local function finish(ids, bodies, dones, tombstones)
  if #ids == 0 then return end
  call('UNLINK', unpack(bodies))
  if call('EXISTS', POLICY, EXPIRY) > 0 then forget_policies(ids) end
  local set = {}
  for i, stone in ipairs(tombstones) do set[2 * i - 1], set[2 * i] = dones[i], stone end
  keep_tombstones(set, #set)
  list_by_key(ids, false)
end

-- Whether a live message that is not in waiting may still be taken back: nil if so, else 'f' (in
-- flight in a group) or 'd' (settled by a group). A group declared after the message was promoted
-- never owed it. With `garbage_counts`, garbage in one group also counts as settled.
local function why_not_taken_back(id, body, garbage_counts)
  if is_partly_settled(fence(body)) then return 'd' end
  local answer, found = 'd', 0
  for _, group in ipairs(groups) do
    local entry = call('HGET', group.entries, id)
    if entry then
      if pending(group, entry) then return 'f' end
      found = found + 1
    elseif call('ZSCORE', group.retry, id) or parked_due(group, id) then
      found = found + 1
    elseif call('ZSCORE', group.garbage, id) then
      if garbage_counts then return 'd' end
      found = found + 1
    end
  end
  return found == 0 and 'd' or nil
end

-- How far a live message with this fence is: 'unstarted' (with its due time, if it waits), 'in_flight' in
-- a group, or 'started' (it failed, or one of several groups has settled it); nil if it is dead.
local function stage_of(id, guard)
  local stage
  local due = call('ZSCORE', WAITING, id)
  if due then return 'unstarted', tonumber(due) end
  for _, group in ipairs(groups) do
    local entry = call('HGET', group.entries, id)
    if entry and pending(group, entry) then return 'in_flight' end
    if entry or call('ZSCORE', group.retry, id) or parked_due(group, id) then
      local begun = is_partly_settled(guard) or call('HEXISTS', group.attempts, id) == 1
      stage = (begun or stage == 'started') and 'started' or 'unstarted'
    end
  end
  return stage
end

-- When a message that no consumer holds is handed out next.
local function due_next(id)
  local due = tonumber(call('ZSCORE', WAITING, id) or '')
  for _, group in ipairs(due and {} or groups) do
    local entry = call('HGET', group.entries, id)
    local at = tonumber(entry and field(read_entry(group, entry) or {}, 'due')
      or call('ZSCORE', group.retry, id) or parked_due(group, id) or '')
    if at and (not due or at < due) then due = at end
  end
  return due
end

-- The number of live messages, garbage excluded.
local function count_live()
  local held = 0
  for _, group in ipairs(groups) do
    held = math.max(held, call('HLEN', group.entries) + call('ZCARD', group.retry) + count_parked(group))
  end
  return call('ZCARD', WAITING) + held
end

-- The journal's event of a send; `expires` and `policy` are nil without.
local function sending(id, state, due, envelope, expires, policy)
  local event = {id, state, '', 0, 'due', int(due), 'envelope', envelope}
  if expires then event[9], event[10] = 'expires', int(tonumber(expires)) end
  if policy then event[#event + 1], event[#event + 2] = 'policy', policy end
  return event
end

-- The state of an id that is not live: 'c' if it was cancelled, 'd' settled, 'u' unknown.
local function verdict(done)
  local stone = call('GET', done)
  if not stone then return 'u' end
  return string.match(stone, '^.........(%a+)') == 'cancelled' and 'c' or 'd'
end
