-- prelude: failed attempts and the retry policy.

-- The pause before retry n in a policy such as '0,0,120000~0.2', or nil after the last retry.
local policies = {}
local function nth_delay(policy, n)
  local known = policies[policy]
  if not known then
    known = {jitter = tonumber(string.match(policy, '~(.*)') or '') or 0}
    for delay in string.gmatch(string.match(policy, '^[^~]*'), '%d+') do
      known[#known + 1] = tonumber(delay)
    end
    policies[policy] = known
  end
  return known[n] and math.ceil(known[n] * (1 + known.jitter * math.random()))
end

-- The retry delays among a message's own policies; nil if it has only others.
local function own_delays(policies)
  local ends = string.find(policies, ';', 1, true)
  if not ends then return policies end
  return string.byte(policies) ~= 42 and string.sub(policies, 1, ends - 1) or nil
end

-- Counts one failed attempt per id, and moves it to the group's retry, or to garbage after the last
-- attempt. The traceback of a reason is kept in garbage only. `delays[i]` is nil (by policy),
-- milliseconds, or 'discard'; ids are distinct. Returns each id's next due time (nil: in garbage) and
-- failed attempts. A pause counts from the time rounded up, so it is never too short.
local function fail(group, ids, entries, delays, reasons)
  if #ids == 0 then return {}, {} end
  local _, now, now_up = clock()
  local failed = call('HMGET', group.attempts, unpack(ids))
  local noted, found = notes_of(group, ids), read_entries(group, entries)
  local own = call('EXISTS', POLICY) == 1 and call('HMGET', POLICY, unpack(ids)) or {}
  local settings = call('HMGET', OPTIONS, 'retry_delays', 'journal')
  local policy, journaled = settings[1] or DEFAULT.retry_delays, settings[2] == '1'
  local dues, attempts, notes, again, dead, dead_ids, events = {}, {}, {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local first = first_due(noted[i], failed[i], found[i])
    failed[i] = tonumber(failed[i] or 0) + 1
    local pause = nth_delay(own[i] and own_delays(own[i]) or policy, failed[i])
    local reason, traceback = parted(reasons[i])
    if pause and delays[i] ~= 'discard' then
      local delay = tonumber(delays[i] or '') or pause
      dues[i] = delay == 0 and now or now_up + delay
      again[#again + 1] = int(dues[i])
      again[#again + 1] = id
    else
      dead[#dead + 1] = int(now)
      dead[#dead + 1] = id
      dead_ids[#dead_ids + 1] = id
    end
    attempts[2 * i - 1], attempts[2 * i] = id, failed[i]
    notes[2 * i - 1], notes[2 * i] = id, reason .. (dues[i] and ending(0, '', first) or traceback)
    if journaled then
      events[i] = {id, 'garbage', group.name, failed[i], 'reason', reason}
      if dues[i] then
        events[i] = {id, 'retry', group.name, failed[i], 'reason', reason,
          'due', int(dues[i])}
      end
    end
  end
  call('HSET', group.attempts, unpack(attempts))
  call('HSET', group.reasons, unpack(notes))
  if #again > 0 then call('ZADD', group.retry, unpack(again)) end
  if #dead > 0 then
    call('ZADD', group.garbage, unpack(dead))
    if GROUP_COUNT == 1 then call('ZREM', EXPIRY, unpack(dead_ids)) end
  end
  if USES.lanes then
    if has_lanes() then
      hold_lanes(group, ids_among(again))
      if lane_rules(group).order == 'hold' then hold_lanes(group, dead_ids) end
    end
  end
  drop_entries(group, ids, entries)
  call('ZREM', group.leases, unpack(ids))
  count('retried', #again / 2, group)
  count('garbage', #dead_ids, group)
  journal(events)
  return dues, failed
end
