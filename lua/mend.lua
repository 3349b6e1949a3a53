-- mend: repairs the state of ids that another program or the loss of a server left inconsistent.
-- Guarantee: never loses a live message: one in no state goes to waiting, due now; one whose stream
-- entry is missing, or was delivered to a consumer name that has been deleted, goes to that group's
-- retry, due now. Records of ids that are not live are deleted.
-- With judge, it reports the faults and changes nothing. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them, then for each id: body
-- ARGV  n; n times id; 1 only to judge, else 0
-- Returns {'OK', the faults of each id, as words separated by spaces, or ''}; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 1]), ARGS + 1
local judge = ARGV[first + n + 1] == '1'
local _, now = clock()
local reply, woken, wrong = {'OK'}, false, 0
local events, journaled = {}, not judge and is_journaled()

local function has_failures(group, id)
  return call('HEXISTS', group.attempts, id) == 1 or call('HEXISTS', group.reasons, id) == 1
    or call('ZSCORE', group.leases, id)
end

-- Whether an entry is pending, or follows the group's last delivered entry.
local function can_be_delivered(group, entry)
  if pending(group, entry) then return true end
  local last = last_delivered(group)
  return not last or is_before(last, entry)
end

-- Replaces an index entry that is useless (it is deleted) or belongs to another id (it is kept).
local function replace_entry(group, id, entry, is_own)
  call('ZADD', group.retry, 'NX', int(now), id)
  call('ZREM', group.leases, id) -- it would apply to the next delivery
  if is_own then drop_entries(group, {id}, {entry}) else call('HDEL', group.entries, id) end
  if USES.lanes then
    if not is_own and has_lanes() then vacate(group, {id}) end
  end
  woken = true
  if journaled then
    events[#events + 1] = {id, 'retry', group.name, call('HGET', group.attempts, id) or 0,
      'due', int(tonumber(call('ZSCORE', group.retry, id))), 'reason', 'entry-lost'}
  end
end

-- A parked message's place among those of all lanes.
local function queued_place(group, id)
  local key, own = lane_of(id)
  return key .. US .. call('HGET', group.parked, id) .. own
end

local function is_queued(group, id) return call('ZSCORE', group.queues, queued_place(group, id)) end

-- Gives a parked message its place back; the count of its lane includes it already.
local function queue_again(group, id)
  local key = lane_of(id)
  call('ZADD', group.queues, 0, queued_place(group, id))
  lanes_of(group, {key})
  reopen(group, {key})
end

-- Reduces one group's states of a live message to one. Returns the number of states left.
local function mend_group(group, id, waits, faults)
  local entry = call('HGET', group.entries, id)
  local fields = entry and read_entry(group, entry)
  local is_own = fields and field(fields, 'id') == id
  local lost = entry and not (is_own and can_be_delivered(group, entry))
  local retries, dead = lost or call('ZSCORE', group.retry, id), call('ZSCORE', group.garbage, id)
  local parked = parked_due(group, id)
  if lost then
    faults[#faults + 1] = 'entry-lost'
    if not judge then replace_entry(group, id, entry, is_own or not fields) end
  end
  local indexed = entry and not lost
  if indexed and retries then
    faults[#faults + 1] = 'second-place'
    if not judge then call('ZREM', group.retry, id) end
  end
  if dead and (indexed or retries) then
    faults[#faults + 1] = 'second-place'
    if not judge then call('ZREM', group.garbage, id) end
  end
  if USES.lanes then
    if parked and (indexed or retries or dead) then
      faults[#faults + 1] = 'second-place'
      if not judge then unpark(group, id) end
    elseif parked and not is_queued(group, id) then
      faults[#faults + 1] = 'unqueued'
      if not judge then queue_again(group, id) end
    end
  end
  if indexed or retries or dead or parked then return 1 end
  -- A rescheduled message waits and keeps its failed attempts.
  if not waits and has_failures(group, id) then
    faults[#faults + 1] = 'leftover'
    if not judge then forget_failures(group, {id}) end
  end
  return 0
end

local function mend_live(id, faults)
  if is_listed(id) == false then
    faults[#faults + 1] = 'unlisted'
    if not judge then list_by_key({id}, true) end
  end
  local waits, states = call('ZSCORE', WAITING, id), 0
  for _, group in ipairs(groups) do
    states = states + mend_group(group, id, waits, faults)
  end
  if waits and states > 0 then
    faults[#faults + 1] = 'second-place'
    if not judge then call('ZREM', WAITING, id) end
  elseif not waits and states == 0 then
    faults[#faults + 1] = 'no-place'
    if not judge then
      call('ZADD', WAITING, int(now), id)
      woken = true
    end
  end
end

local function mend_dead(id, faults)
  local found = is_listed(id) or call('ZSCORE', WAITING, id) or call('HEXISTS', POLICY, id) == 1
    or call('ZSCORE', EXPIRY, id)
  for _, group in ipairs(groups) do
    found = found or owes(group, id) or has_failures(group, id)
    if not judge then take_out(group, id) end
  end
  if not judge then
    call('ZREM', WAITING, id)
    call('HDEL', POLICY, id)
    call('ZREM', EXPIRY, id)
    list_by_key({id}, false)
  end
  if found then faults[#faults + 1] = 'no-body' end
end

if not judge then allow_writes_at_maxmemory() end
for i = 1, n do
  local id, faults = ARGV[first + i], {}
  if call('EXISTS', KEYS[ID_KEYS + i]) == 1 then mend_live(id, faults) else mend_dead(id, faults) end
  reply[i + 1] = table.concat(faults, ' ')
  if #faults > 0 then wrong = wrong + 1 end
  if journaled and #faults > 0 then
    local event = {id, 'mended', '', 0, 'reason', reply[i + 1]}
    if faults[1] == 'no-body' then
      event[2], event[7], event[8] = 'lost', 'end', 1
    elseif faults[#faults] == 'no-place' then
      event[7], event[8] = 'due', int(now)
    end
    events[#events + 1] = event
  end
end
journal(events)
if woken then wake() end
return wrong > 0 and not judge and remember(reply) or reply
