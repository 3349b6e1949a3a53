-- prelude: a topic's clock, options, counters and journal.

-- Microseconds, and milliseconds rounded down (for comparing) and up (for adding delays).
local time
local function clock()
  time = time or call('TIME')
  local seconds, micros = tonumber(time[1]), tonumber(time[2])
  return seconds * 1000000 + micros,
    seconds * 1000 + math.floor(micros / 1000), seconds * 1000 + math.ceil(micros / 1000)
end

-- Lua formats large numbers as 2.5e+14; Redis needs all digits.
local function int(n) return string.format('%.0f', n) end

local function option(name)
  return tonumber(call('HGET', OPTIONS, name) or DEFAULT[name])
end

-- The options for which a topic uses lanes, with their defaults. A group's own values are in fields whose
-- names end in '@' and the group.
local LANE_OPTIONS = {
  rate = DEFAULT.rate, key_rate = DEFAULT.key_rate, concurrency = DEFAULT.concurrency,
  key_concurrency = DEFAULT.key_concurrency, order = DEFAULT.order, fair = DEFAULT.fair,
  slack = DEFAULT.slack,
}

local function count(name, n, group)
  if n > 0 then call('HINCRBY', STATS, group and name .. '@' .. group.name or name, n) end
end

-- Keeps a group's highest lateness in ms; '' is none.
local function keep_highest(name, ms)
  local field = 'late_max@' .. name
  if ms ~= '' and tonumber(ms) > tonumber(call('HGET', STATS, field) or 0) then
    call('HSET', STATS, field, ms)
  end
end

-- A server at maxmemory refuses a script whose first write can use memory, but allows all writes
-- after a harmless first one. Scripts that free memory therefore start with this.
local function allow_writes_at_maxmemory() call('ZREM', WAITING, '') end

local function wake() call('PUBLISH', WAKE, TOPIC) end

-- The options of a settlement, read once: journal, retention, dedupe_for, lanes.
local settling
local function settling_options()
  settling = settling or call('HMGET', OPTIONS, 'journal', 'retention', 'dedupe_for', 'lanes')
  return settling
end

-- Whether the topic keeps a journal. Scripts that read several options anyway read this with them.
local function is_journaled() return settling_options()[1] == '1' end

-- Appends events, {id, state, group's name or '', attempt, further field, value, ...} each, to the
-- journal, with consecutive numbers. The queue never stops for the journal: an event that cannot be
-- written (another program uses the key) is counted, and its number is missing.
local function journal(events)
  if #events == 0 then return end
  allow_writes_at_maxmemory() -- this may be the script's first write at maxmemory
  local number, failed = call('HINCRBY', STATS, 'journaled', #events) - #events, 0
  for i, event in ipairs(events) do
    local added = redis.pcall('XADD', EVENTS, '*', 'n', int(number + i), 'actor', ACTOR,
      'id', event[1], 'state', event[2], 'group', event[3], 'attempt', event[4], unpack(event, 5))
    if type(added) == 'table' and added.err then failed = failed + 1 end
  end
  count('journal_failed', failed)
end

-- The id in the key of a message's body, which differs from that of `waiting` by 'body:<id>'.
local function id_of(body) return string.sub(body, #WAITING - 1) end

-- The due time of a send or a reschedule: '+ms' is a delay, else epoch ms.
local function due_from(spec)
  if string.byte(spec) ~= 43 then return tonumber(spec) end
  local delay, _, now, now_up = tonumber(string.sub(spec, 2)), clock()
  return delay == 0 and now or now_up + delay
end

local function head(zset)
  local first = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  return first[1] and tonumber(first[2])
end
