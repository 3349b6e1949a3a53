-- prelude: the gate between parked and ready.

-- The unread entries that a group has at least room for; how long a manager waits before it looks again;
-- and the age of an unread entry from which no rate lets more through.
local SHORTEST, SOONEST_MS, LATEST_MS, STALE_MS = 16, 5, 250, 1000

-- Counts the slots that messages took before the topic had lanes.
local function count_slots(group)
  local keys, used = {}, slots_by_key(group)
  for key in pairs(used) do keys[#keys + 1] = key end
  for from = 1, #keys, 500 do
    local part = {unpack(keys, from, math.min(from + 499, #keys))}
    local lanes = lanes_of(group, part)
    for _, key in ipairs(part) do lanes[key].used, group.changed[key] = used[key], true end
    write_lanes(group)
  end
end

-- What a group's gate remembers: the most unread entries, 1 if these were too few, when it last let a message
-- through in ms, the number of the options' last change, the clock in us, and from where in QUEUES it still
-- has to look at lanes again after that change; '' if nowhere.
local function gate_of(group)
  local text = call('HGET', group.lanes, US .. US)
  if not text then
    count_slots(group)
    text = '16 0 0 0 0 '
  end
  local short, limited, passed, changed, seen, again =
    string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  return {short = tonumber(short), limited = tonumber(limited), passed = tonumber(passed),
    changed = tonumber(changed), seen = tonumber(seen), again = again}
end

local function save_gate(group, gate)
  call('HSET', group.lanes, US .. US, table.concat({gate.short, gate.limited, int(gate.passed),
    int(gate.changed), int(gate.seen), gate.again}, ' '))
end

-- How many messages a group has room for. The stream is kept short, so that turns are decided late: as long
-- as what consumers read between two calls.
local function gate_room(group, rules, gate, max_ready)
  local info = group_info(group) or {}
  local unread = call('XLEN', group.ready) - (field(info, 'pending') or 0)
  gate.unread, gate.last = unread, field(info, 'last-delivered-id')
  if unread == 0 and gate.limited == 1 then
    gate.short = 2 * gate.short
  elseif 2 * unread > gate.short then
    gate.short = gate.short - math.ceil(gate.short / 8)
  end
  gate.short = math.max(math.min(gate.short, max_ready), math.min(SHORTEST, max_ready))
  local room = gate.short - unread
  gate.is_by_slots = rules.concurrency ~= nil and rules.concurrency - call('HLEN', group.entries) < room
  return gate.is_by_slots and rules.concurrency - call('HLEN', group.entries) or room
end

-- Gives a turn to each lane that has parked messages, up to 250 in this call: limits may have changed.
local function look_again(group, gate)
  local keys, at = {}, {}
  while gate.again ~= '' and #keys < 250 do
    local place = call('ZRANGE', group.queues, gate.again, '+', 'BYLEX', 'LIMIT', 0, 1)[1]
    local key = place and split_id(place)
    if key then
      keys[#keys + 1], at[#keys + 1] = key, latest_of(key, place)
    end
    gate.again = key and '(' .. key .. ' ' or ''
  end
  for key, lane in pairs(lanes_of(group, keys)) do
    if let_dead_go(group, lane) then group.changed[key] = true end
  end
  give_turns(group, keys, at)
end

-- Gives a turn to the lanes whose instant has come; after a change of options, or of the clock, to all.
local function open_lanes(group, gate, first, now_us, now, changed)
  if gate.changed ~= changed or now_us < gate.seen - 1000000 then gate.again = '-' end
  gate.changed, gate.seen = changed, now_us
  if gate.again ~= '' then look_again(group, gate) end
  if not first or first > now then return end
  local open = call('ZRANGEBYSCORE', group.closed, '-inf', now, 'LIMIT', 0, 250)
  call('ZREM', group.closed, unpack(open))
  lanes_of(group, open)
  local turns, idle = {}, {}
  for _, key in ipairs(open) do
    local list = group.known[key].parked > 0 and turns or idle
    if key ~= US then list[#list + 1] = key end
  end
  give_turns(group, turns)
  if #idle > 0 then save_lanes(group, idle) end
end

-- Whether consumers have left an entry unread for long, so that what a rate lets through now would later be
-- handled at once with it.
local function is_unread_long(run)
  if run.is_stale == nil then
    local last = run.gate.unread > 0 and run.gate.last
    local first = last and call('XRANGE', run.group.ready, '(' .. last, '+', 'COUNT', 1)[1]
    run.is_stale = first and run.now_us / 1000 - tonumber(string.match(first[1], '^%d+')) > STALE_MS or false
  end
  return run.is_stale
end

-- Why a lane lets its first message through ('pass') or not: 'empty', 'full', or the instant at which it
-- opens, in us; and whether the whole group has to wait for that instant.
local function verdict_on(run, lane, own, cost)
  local now_us, rules = run.now_us, run.rules
  if not own then return 'empty' end
  if lane.head ~= '' and lane.head ~= own then return 'full' end
  local slots = lane.used + lane.taken
  if lane.most and slots >= lane.most then return 'full' end
  if slots > 0 and lane.key ~= '' and (own == '~1' or own == '~2') then -- coalesced: see keyed.lua
    return 'full'
  end
  if lane.rest > now_us then return lane.rest end
  if (lane.rate or rules.rate) and is_unread_long(run) then return now_us + 1000 * LATEST_MS, true end
  local at = lane.rate and opens_at(lane, lane.rate, cost, now_us) or 0
  if at > now_us then return at end
  at = rules.rate and opens_at(run.all, rules.rate, cost, now_us) or 0
  if at > now_us then return at, true end
  return 'pass'
end

-- Lets the first message of a lane through: `place` in its lane, `own` id. Returns the score of the lane's
-- next turn, if it has one.
local function pass(run, turn, place, own, cost)
  local lane, rules, k = turn.lane, run.rules, #run.ids + 1
  local id, from = lane.key == '' and own or lane.key .. US .. own, #lane.key + 29
  local due = string.match(string.sub(place, from, from + 12), '^0*(%d+)$')
  run.ids[k], run.places[k], run.through[2 * k - 1], run.through[2 * k] = id, place, id, due
  run.room, run.group.changed[lane.key] = run.room - 1, true
  lane.taken, lane.at = lane.taken + 1, lane.at + 1
  if lane.head == own then lane.head = '' end
  if lane.rate then charge(lane, lane.rate, cost, run.now_us) end
  if rules.rate then charge(run.all, rules.rate, cost, run.now_us) end
  if rules.fair then
    run.all.finish = math.max(run.all.finish, turn.score)
    lane.finish = turn.score + math.ceil(1000 * cost / lane.weight)
  end
  if lane.parked > lane.taken and is_blocked(lane) then return nil end
  if rules.fair then return lane.finish end
  local following = first_place(run.group, lane)
  return following and tonumber(latest_of(lane.key, following))
end

-- A lane, or the whole group, lets nothing through until an instant, in us.
local function close(run, key, at)
  local at_ms = math.ceil(at / 1000)
  if key == US then run.stops = at_ms end
  run.opens = math.min(run.opens or at_ms, at_ms)
  call('ZADD', run.group.closed, int(at_ms), key)
end

-- Decides one turn. Returns the score of the lane's next turn, if it has one.
local function serve(run, turn)
  local lane, fair = turn.lane, run.rules.fair
  local place = first_place(run.group, lane)
  local latest = place and not fair and tonumber(latest_of(lane.key, place))
  if latest and latest > turn.score then return latest end
  local from = #lane.key + 2
  local own = place and string.sub(place, from + PLACE_BYTES)
  local cost = place and tonumber(string.sub(place, from + 23, from + 26))
  local verdict, is_for_all = verdict_on(run, lane, own, cost)
  if verdict == 'pass' then return pass(run, turn, place, own, cost) end
  if is_for_all then
    close(run, US, verdict)
    return turn.score
  end
  if verdict == 'empty' then
    run.group.changed[lane.key] = true -- to be forgotten
    if fair then run.all.finish = math.max(run.all.finish, turn.score) end
  elseif type(verdict) == 'number' then
    close(run, lane.key, verdict)
    run.group.changed[lane.key] = true -- its rate may have been adapted to a clock that was set back
  end
  return nil
end

-- Decides the next turns of a group, in order. Returns whether there was any.
local function serve_turns(run)
  local group, asked, list, keys = run.group, math.min(run.room, 64), {}, {}
  local page = call('ZRANGE', group.turns, 0, asked - 1, 'WITHSCORES')
  for k = 1, #page, 2 do keys[#keys + 1] = page[k] end
  local lanes, scores, set, gone, i = lanes_of(group, keys), {}, {}, {}, 1
  for k, key in ipairs(keys) do list[k] = {lane = lanes[key], score = tonumber(page[2 * k])} end
  local last = #keys == asked and list[asked].score or math.huge
  while list[i] and run.room > 0 and not run.stops do
    local lane, score = list[i].lane, serve(run, list[i])
    i, run.looks, scores[lane.key] = i + 1, run.looks - 1, score or false
    if score and score <= last then
      local at = i
      while list[at] and list[at].score <= score do at = at + 1 end
      table.insert(list, at, {lane = lane, score = score})
    end
  end
  for key, score in pairs(scores) do
    if score then set[#set + 1], set[#set + 2] = score, key else gone[#gone + 1] = key end
  end
  if #set > 0 then call('ZADD', group.turns, unpack(set)) end
  if #gone > 0 then call('ZREM', group.turns, unpack(gone)) end
  return i > 1
end

-- Moves what was let through from parked to ready.
local function move_through(run)
  local group = run.group
  local failed = failed_attempts(group, run.ids)
  call('HDEL', group.parked, unpack(run.ids))
  call('ZREM', group.queues, unpack(run.places))
  for key in pairs(group.changed) do
    local lane = group.known[key]
    lane.used, lane.parked = lane.used + lane.taken, lane.parked - lane.taken
    lane.taken, lane.ahead = 0, nil
  end
  group.has_slots = true
  add_ready(group, {unpack(run.through)}, failed, failed and suspects_among(group, run.ids))
end

-- When a manager has to call again for a group, in ms: when a lane opens, or soon if consumers may have made
-- room by reading; nil if only other calls change anything.
local function next_call(run, gate, now)
  if gate.again ~= '' then return now end
  local first = head(run.group.closed)
  if run.stops or gate.is_by_slots or call('EXISTS', run.group.turns) == 0 then return first end
  if run.room > 0 or run.is_cut then return now end
  local pause = math.floor((now - gate.passed) / 4)
  return math.min(first or math.huge, now + math.max(SOONEST_MS, math.min(LATEST_MS, pause)))
end

-- Lets parked messages through to ready in the order of their lanes' turns, at most `most`. `settings` are
-- the options max_ready and lanes_changed. Returns when a manager has to call again, the messages as pairs
-- {id, due time, ...}, and whether a lane opens sooner than any that managers know of. The script has
-- already called `will_fill`.
local function fill(group, most, settings)
  local gate, now_us, now = gate_of(group), clock()
  local run = {group = group, gate = gate, rules = lane_rules(group), all = whole(group), now_us = now_us,
    ids = {}, places = {}, through = {}, room = math.huge, looks = most + 250}
  local known = head(group.closed)
  open_lanes(group, gate, known, now_us, now, tonumber(settings[2] or 0))
  if call('EXISTS', group.turns) == 1 then
    local rate = run.rules.rate
    local at = rate and opens_at(run.all, rate, 1, now_us) or 0
    if at > now_us then
      close(run, US, at)
    else
      local room = gate_room(group, run.rules, gate, tonumber(settings[1] or DEFAULT.max_ready))
      run.room, run.is_cut = math.min(most, room), room > most
      while run.room > 0 and run.looks > 0 and not run.stops and serve_turns(run) do end
    end
  end
  if #run.ids > 0 then
    move_through(run)
    gate.passed = now
  end
  group.changed[US] = true
  write_lanes(group)
  local next_at = next_call(run, gate, now)
  gate.limited = run.room <= 0 and not run.is_cut and not gate.is_by_slots and next_at and 1 or 0
  save_gate(group, gate)
  return next_at, run.through, run.opens and run.opens < (known or math.huge)
end
