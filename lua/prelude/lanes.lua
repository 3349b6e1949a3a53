-- prelude: lanes. A lane is the messages of a group that have the same key; those without a key share the
-- lane of the empty key, to which no limit per key applies.
--
-- In topics with lanes, a due message is parked: PARKED has its place in its lane, and QUEUES the places of
-- all lanes in order. `fill` moves it to ready when its lane lets it through. It holds a slot of its lane
-- exactly while its id is in the group's entries: `add_ready` takes the slot, and `drop_entries` gives it
-- back, whatever the cause. LANES has the state of each lane as numbers and perhaps the id of its failing
-- head. TURNS has the lanes that may let a message through, in the order of their turns, and CLOSED those
-- that open at an instant.

-- A place, which sorts in the order of a lane: when the message should be ready at the latest, in ms, the
-- number of its send, its cost and its due time: PLACE_BYTES in all. QUEUES has it between 'key<US>' and the
-- rest of the id.
local function place_of(latest, number, cost, due)
  return string.format('%013d%010d%04d%013d', math.max(0, latest), number, cost, due)
end

-- Whether the topic has lanes; scripts that read its options anyway set the variable.
local lanes_in_use
local function has_lanes()
  if USES.lanes then
    if lanes_in_use == nil then lanes_in_use = call('HGET', OPTIONS, 'lanes') == '1' end
    return lanes_in_use
  end
  return false
end

local function changed_topic()
  if not USES.lanes then
    if call('HGET', OPTIONS, 'lanes') == '1' then return {'FEATURES', 'lanes'} end
  end
  return changed_groups()
end

-- The key of an id's lane, and the rest of the id.
local lane_keys, own_ids = {}, {}
local function lane_of(id)
  if not own_ids[id] then
    local key, own = split_id(id)
    lane_keys[id], own_ids[id] = key or '', own or id
  end
  return lane_keys[id], own_ids[id]
end

-- A rate such as '10,60000,3': messages, per ms, burst; periods are in us from here on.
local function read_rate(text)
  local many, per, burst = string.match(text or '', '^(%d+),(%d+),(%d+)$')
  if not many then return nil end
  return {many = tonumber(many), per = 1000 * tonumber(per), burst = tonumber(burst)}
end

-- The topic's options about lanes; those of the group come first.
local function lane_rules(group)
  if group.rules then return group.rules end
  local own = '@' .. group.name
  local set = call('HMGET', OPTIONS, 'rate' .. own, 'key_rate' .. own, 'concurrency' .. own,
    'key_concurrency' .. own, 'order' .. own, 'fair' .. own, 'slack' .. own, 'rate', 'key_rate',
    'concurrency', 'key_concurrency', 'order', 'fair', 'slack')
  local function of(i) return set[i] or set[i + 7] or '' end
  group.rules = {
    rate = read_rate(of(1)), key_rate = read_rate(of(2)), concurrency = tonumber(of(3)),
    key_concurrency = tonumber(of(4)), order = of(5) ~= '' and of(5) or nil, fair = of(6) == '1',
    slack = tonumber(of(7)) or 0,
  }
  return group.rules
end

-- Reads the limits that are set for single keys into their lanes, those for this group last.
local function read_limits(group, keys)
  if #keys == 0 or call('EXISTS', KEYS[LANES_AT]) == 0 then return end
  local fields = {}
  for i, key in ipairs(keys) do fields[2 * i - 1], fields[2 * i] = key, group.name .. US .. key end
  for i, text in ipairs(call('HMGET', KEYS[LANES_AT], unpack(fields))) do
    local lane = group.known[keys[math.ceil(i / 2)]]
    for name, value in string.gmatch(text or '', '(%a+)=([^;]*)') do
      if name == 'rate' then
        lane.rate = read_rate(value)
      elseif name == 'concurrency' then
        lane.most = tonumber(value)
      else
        lane.weight = tonumber(value) or 1
      end
    end
  end
end

-- The lanes of some keys, by key, each read once in a call. `used` slots, `parked` messages; `tat` and `rem`:
-- the theoretical arrival time of its rate in us, and the rest in `many`-ths of that; `rest`: until when it
-- rests, in us; `finish`: its virtual finish time; `head`: the own id of the message that holds it.
local function lanes_of(group, keys)
  local known, missing, rules = group.known or {}, {}, lane_rules(group)
  group.known = known
  for _, key in ipairs(keys) do
    if known[key] == nil then known[key], missing[#missing + 1] = false, key end
  end
  if #missing == 0 then return known end
  for i, text in ipairs(call('HMGET', group.lanes, unpack(missing))) do
    local key = missing[i]
    local used, parked, more = string.match(text or '0 0', '^(%d+) (%d+)(.*)$')
    local has_limits = key ~= '' and key ~= US
    -- All fields at once: a table that grows field by field is allocated four times.
    local lane = {key = key, used = tonumber(used), parked = tonumber(parked), taken = 0, tat = 0, rem = 0,
      rest = 0, finish = 0, head = '', weight = 1, rate = has_limits and rules.key_rate or nil,
      most = has_limits and rules.key_concurrency or nil, ahead = nil, at = 1}
    if more ~= '' then
      local tat, rem, rest, finish, own = string.match(more, '^ (%d+) (%d+) (%d+) (%d+) (.*)$')
      lane.tat, lane.rem, lane.rest = tonumber(tat), tonumber(rem), tonumber(rest)
      lane.finish, lane.head = tonumber(finish), rules.order and own or ''
    end
    known[key] = lane
  end
  read_limits(group, missing)
  for _, key in ipairs(rules.order and missing or {}) do
    if key ~= '' and key ~= US then known[key].most = 1 end
  end
  return known
end

-- The group's own lane: `tat` and `rem` of its rate, and the virtual time as `finish`.
local function whole(group) return lanes_of(group, {US})[US] end

-- A lane as LANES has it.
local function text_of(lane)
  if lane.tat + lane.rest + lane.finish == 0 and lane.head == '' then return lane.used .. ' ' .. lane.parked end
  return table.concat({lane.used, lane.parked, int(lane.tat), int(lane.rem), int(lane.rest), int(lane.finish),
    lane.head}, ' ')
end

-- The slots that each key's messages take.
local function slots_by_key(group)
  local slots = {}
  for _, id in ipairs(call('HKEYS', group.entries)) do
    local key = lane_of(id)
    slots[key] = (slots[key] or 0) + 1
  end
  return slots
end

-- For scripts that call `fill` at their end: what the lanes become is written there.
local function will_fill(group) group.is_filled, group.changed = true, {} end

-- Writes changed lanes back, and forgets those that are as new.
local function write_lanes(group)
  local set, gone, now_us = {}, {}, clock()
  local virtual = lane_rules(group).fair and whole(group).finish
  for key in pairs(group.changed) do
    local lane = group.known[key]
    local is_idle = lane.used + lane.parked == 0 and lane.head == '' and key ~= US
    local owes_until = math.max(lane.tat, lane.rest)
    if is_idle and owes_until <= now_us and not (virtual and lane.finish > virtual) then
      gone[#gone + 1] = key
    else
      set[#set + 1], set[#set + 2] = key, text_of(lane)
    end
    -- An idle lane is forgotten once it owes nothing, also no turns.
    if is_idle and virtual and lane.finish > virtual then call('ZADD', group.turns, 'NX', int(lane.finish), key) end
    if is_idle and owes_until > now_us then call('ZADD', group.closed, int(math.ceil(owes_until / 1000)), key) end
  end
  if #set > 0 then call('HSET', group.lanes, unpack(set)) end
  if #gone > 0 then call('HDEL', group.lanes, unpack(gone)) end
  group.changed = {}
end

-- Notes that lanes have changed. They are written at once, or at the end by a script that calls `fill`.
local function save_lanes(group, keys)
  if not group.is_filled then group.changed = {} end
  for _, key in ipairs(keys) do group.changed[key] = true end
  if not group.is_filled then write_lanes(group) end
end

-- The first place of a lane, with an own id, that this call has not taken.
local function first_place(group, lane)
  if lane.parked <= lane.taken then return nil end
  if not lane.ahead or not lane.ahead[lane.at] then
    local n = lane.most == 1 and 1 or math.min(8, lane.parked - lane.taken)
    lane.at, lane.ahead = 1, call('ZRANGE', group.queues, '[' .. lane.key .. US, '(' .. lane.key .. ' ', 'BYLEX',
      'LIMIT', lane.taken, n)
  end
  return lane.ahead[lane.at]
end

-- The latest instant of the message that has a place: 13 digits, in ms.
local function latest_of(key, place) return string.sub(place, #key + 2, #key + 14) end

local function is_blocked(lane)
  return lane.head ~= '' or lane.most and lane.used + lane.taken >= lane.most
end

-- Gives lanes their turns; `at` has the latest instant of each lane's first message, if it is known.
local function give_turns(group, keys, at)
  if #keys == 0 then return end
  local turns, is_fair = {}, lane_rules(group).fair
  local virtual = is_fair and whole(group).finish
  for i, key in ipairs(keys) do
    local lane = group.known[key]
    local score = is_fair and math.max(virtual, lane.finish) or at and at[i]
    if not score then
      local place = first_place(group, lane)
      score = place and latest_of(key, place) or '0'
    end
    turns[2 * i - 1], turns[2 * i] = score, key
  end
  call('ZADD', group.turns, is_fair and 'NX' or 'LT', unpack(turns))
end

-- The different keys of some ids.
local function keys_of(ids)
  local keys, seen = {}, {}
  for _, id in ipairs(ids) do
    local key = lane_of(id)
    if not seen[key] then seen[key], keys[#keys + 1] = true, key end
  end
  return keys
end

-- Takes slots for messages, given as pairs {id, due time, ...}, that are not yet among the group's entries.
local function occupy(group, pairs)
  local ids = {}
  for k = 1, #pairs, 2 do ids[#ids + 1] = pairs[k] end
  if #ids == 0 then return end
  local keys, held = keys_of(ids), call('HMGET', group.entries, unpack(ids))
  local lanes = lanes_of(group, keys)
  for i, id in ipairs(ids) do
    local lane = lanes[lane_of(id)]
    if not held[i] then lane.used = lane.used + 1 end
  end
  save_lanes(group, keys)
end

-- Adapts the theoretical arrival time of a lane to its rate, also after the clock was set back.
local function settle_tat(lane, rate, now_us)
  local most = now_us + math.ceil(rate.burst * rate.per / rate.many)
  lane.rem = math.min(lane.rem, rate.many - 1)
  if lane.tat < now_us then lane.tat, lane.rem = now_us, 0 end
  if lane.tat >= most then lane.tat, lane.rem = most, 0 end
end

-- When a lane's rate lets a message through, in us; at most `now_us` if it does now. This is GCRA (ITU-T
-- I.371) with the fraction of a microsecond kept as an integer, so that nothing is rounded. A message that
-- costs more than the burst counts as the burst.
local function opens_at(lane, rate, cost, now_us)
  settle_tat(lane, rate, now_us)
  local over = lane.rem + (math.min(cost, rate.burst) - rate.burst) * rate.per
  return lane.tat + math.ceil(over / rate.many)
end

local function charge(lane, rate, cost, now_us)
  settle_tat(lane, rate, now_us)
  local sum = lane.rem + math.min(cost, rate.burst) * rate.per
  lane.tat, lane.rem = lane.tat + math.floor(sum / rate.many), sum % rate.many
end

-- Lanes may have a turn again, or open at an instant. Unless this script calls `fill`, a manager does.
local function reopen(group, keys)
  local open, closed, now_us, known = {}, {}, clock(), nil
  for _, key in ipairs(keys) do
    local lane = group.known[key]
    -- Also one that is held: the message that holds it may have waited for a slot.
    local is_full = lane.most and lane.used + lane.taken >= lane.most
    if lane.parked > 0 and not is_full then
      local at = math.max(lane.rest, lane.rate and opens_at(lane, lane.rate, 1, now_us) or 0)
      if at > now_us then
        closed[#closed + 1], closed[#closed + 2] = int(math.ceil(at / 1000)), key
        known = known or head(group.closed)
      else
        open[#open + 1] = key
      end
    end
  end
  give_turns(group, open)
  if #closed > 0 then call('ZADD', group.closed, unpack(closed)) end
  local opens_sooner = #closed > 0 and head(group.closed) ~= known
  if opens_sooner or not group.is_filled and (#open > 0 or call('EXISTS', group.turns) == 1) then wake() end
end

-- Gives back the slots of ids that have left the group's entries.
local function vacate(group, ids)
  local keys = keys_of(ids)
  local lanes = lanes_of(group, keys)
  for _, id in ipairs(ids) do
    local lane = lanes[lane_of(id)]
    lane.used = math.max(0, lane.used - 1)
  end
  save_lanes(group, keys)
  reopen(group, keys)
end

-- With an order, a message that failed or was deferred goes on holding its lane.
local function hold_lanes(group, ids)
  if not lane_rules(group).order then return end
  local keys = keys_of(ids)
  local lanes = lanes_of(group, keys)
  for _, id in ipairs(ids) do
    local key, own = lane_of(id)
    if key ~= '' and lanes[key].head == '' then lanes[key].head = own end
  end
  save_lanes(group, keys)
end

-- A message that held its lane will not come back.
local function let_go(group, id)
  local key, own = lane_of(id)
  local lane = lanes_of(group, {key})[key]
  -- Without an order, a record may still have the head that it had with one.
  if lane.head ~= own and lane_rules(group).order then return end
  lane.head = ''
  save_lanes(group, {key})
  reopen(group, {key})
end

-- A dead message holds its lane no longer once the order is not `hold`. Returns whether it did.
local function let_dead_go(group, lane)
  if lane.head == '' or lane_rules(group).order == 'hold' then return false end
  if not call('ZSCORE', group.garbage, lane.key .. US .. lane.head) then return false end
  lane.head = ''
  return true
end

-- Parks messages that are due, given as pairs {id, due time, ...}.
local function park(group, pairs)
  if #pairs == 0 then return end
  local rules, ids = lane_rules(group), {}
  for k = 1, #pairs, 2 do ids[#ids + 1] = pairs[k] end
  local own_policies = call('EXISTS', POLICY) == 1 and call('HMGET', POLICY, unpack(ids)) or {}
  local keys = keys_of(ids)
  local lanes = lanes_of(group, keys)
  for _, key in ipairs(keys) do let_dead_go(group, lanes[key]) end
  local queued, spots, open, at = {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local key, own = lane_of(id)
    local lane, due = lanes[key], pairs[2 * i]
    local cost, slack, number
    if own_policies[i] then
      cost, slack, number = string.match(own_policies[i], '^[^;]*;[^;]*;(%d*),(%d*),?(%d*)$')
    end
    local is_head = lane.head ~= '' and lane.head == own
    local latest = is_head and 0 or due + (slack and tonumber(slack) or rules.slack)
    local spot = place_of(latest, number and tonumber(number) or 0, cost and tonumber(cost) or 1, due)
    queued[2 * i - 1], queued[2 * i] = '0', key .. US .. spot .. own
    spots[2 * i - 1], spots[2 * i] = id, spot
    lane.parked, lane.ahead = lane.parked + 1, nil
    if is_head or not is_blocked(lane) then
      local k = #open + 1
      open[k], at[k] = key, string.sub(spot, 1, 13)
    end
  end
  call('ZADD', group.queues, unpack(queued))
  call('HSET', group.parked, unpack(spots))
  save_lanes(group, keys)
  give_turns(group, open, at)
end

-- Parks messages whose handlers met a limit, given as pairs, and lets their lanes rest: `rests` has the
-- milliseconds of each. With an order, a message stays the first of its lane: after a failure its due time is
-- later than those that follow.
local function park_resting(group, pairs, rests)
  park(group, pairs)
  local keys, closed, now_us = {}, {}, clock()
  for k, rest in ipairs(rests) do
    local lane = group.known[lane_of(pairs[2 * k - 1])]
    lane.rest, keys[k] = math.max(lane.rest, now_us + 1000 * rest), lane.key
    closed[2 * k - 1], closed[2 * k] = int(math.ceil(lane.rest / 1000)), lane.key
  end
  call('ZADD', group.closed, unpack(closed))
  call('ZREM', group.turns, unpack(keys))
  save_lanes(group, keys)
  wake()
end

-- Takes a message out of those that are parked; returns whether it was one.
local function unpark(group, id)
  local spot = call('HGET', group.parked, id)
  if not spot then return false end
  local key, own = lane_of(id)
  local lane = lanes_of(group, {key})[key]
  call('HDEL', group.parked, id)
  call('ZREM', group.queues, key .. US .. spot .. own)
  lane.parked, lane.ahead = math.max(0, lane.parked - 1), nil
  if lane.parked == 0 and not lane_rules(group).fair then call('ZREM', group.turns, key) end
  save_lanes(group, {key})
  if is_coalesced(id) and lane.used > 0 then reopen(group, {key}) end -- it may have waited for the other one
  return true
end

-- Takes a message out of its lane for good; returns whether it was parked.
local function leave_lane(group, id)
  if USES.lanes then
    if has_lanes() then
      local was_parked = unpark(group, id)
      let_go(group, id)
      return was_parked
    end
  end
  return false
end

-- When a parked message was due, in ms; nil if the message is not parked.
local function parked_due(group, id)
  if USES.lanes then
    local spot = has_lanes() and call('HGET', group.parked, id)
    return spot and tonumber(string.sub(spot, 28)) or nil
  end
  return nil
end

local function count_parked(group)
  if USES.lanes then
    return has_lanes() and call('HLEN', group.parked) or 0
  end
  return 0
end

-- With an order, messages with the same due time are handled in the order of their sends: the third of a
-- message's policies has the number of its send, after its cost and slack. Restored ones keep theirs; later
-- sends have higher numbers.
local function number_sends(ids)
  local set = call('HMGET', OPTIONS, 'ordered', 'ordered_after')
  if set[1] ~= '1' then return end
  local sent = tonumber(call('HGET', STATS, 'sent') or 0) + tonumber(set[2] or 0)
  for k, id in ipairs(ids) do
    if split_id(id) then
      local delays, late, rest = string.match(call('HGET', POLICY, id) or '*', '^([^;]*);?([^;]*);?(.*)$')
      local cost, slack = string.match(rest, '^(%d*),?(%d*)')
      call('HSET', POLICY, id, table.concat({delays, ';', late, ';', cost, ',', slack, ',', int(sent + k)}))
    end
  end
end
