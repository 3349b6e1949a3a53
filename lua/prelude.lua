-- prelude: put before every script, so that all of them read KEYS and ARGV alike. The loader leaves
-- out the paragraphs of which a script uses nothing.
--
-- KEYS  1-8 the topic's: waiting, policy, expiry, options, groups, stats, consumers, events
--       then seven for each group: ready, entries, retry, garbage, attempts, reasons, leases
--       then the keys of single messages, as the script's own header says
-- ARGV  1 the wake channel, 2 the topic, 3 the actor (who calls, for the journal), 4 the number of
--       groups, then their names, then the script's own; "n each of a, b" are columns: all a, then all b
--
-- `DEFAULT`, the topic options where none are written, is put before this file by the loader.
-- Every script that moves messages between groups begins by comparing the groups it was given
-- with those declared, and answers {'GROUPS', name, ...} if they differ: the caller learns and
-- calls again. So every key is declared, and no group is ever left out.
local call, KEYS, ARGV = redis.call, KEYS, ARGV -- a local is found sooner than a global
local WAITING, POLICY, EXPIRY, OPTIONS, GROUPS, STATS, CONSUMERS, EVENTS =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local WAKE, TOPIC, ACTOR, GROUP_COUNT = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local ARGS = 4 + GROUP_COUNT
local ID_KEYS = 8 + 7 * GROUP_COUNT

local groups = {}
for i = 1, GROUP_COUNT do
  local k = 1 + 7 * i
  groups[i] = {
    name = ARGV[4 + i], ready = KEYS[k + 1], entries = KEYS[k + 2], retry = KEYS[k + 3],
    garbage = KEYS[k + 4], attempts = KEYS[k + 5], reasons = KEYS[k + 6], leases = KEYS[k + 7],
  }
end

local function changed_groups()
  local declared = call('HKEYS', GROUPS)
  if GROUP_COUNT == 1 and #declared == 1 and declared[1] == ARGV[5] then return nil end
  local known, same = {}, #declared == GROUP_COUNT
  for _, group in ipairs(groups) do known[group.name] = true end
  for _, name in ipairs(declared) do same = same and known[name] end
  if same then return nil end
  return {'GROUPS', unpack(declared)}
end

-- A topic may be split over several places. Each place takes new messages only from callers who
-- know the layout by its number, `accepts`, and its negative means that they belong elsewhere by
-- now. Who asks every place, one after the other, gives ''.
local function misplaced(believed)
  if believed == '' or (call('HGET', OPTIONS, 'accepts') or '0') == believed then return nil end
  return {'SHARDS'}
end

-- Microseconds, and milliseconds rounded down (for comparing) and up (for adding delays).
local function clock()
  local t = call('TIME')
  local seconds, micros = tonumber(t[1]), tonumber(t[2])
  return seconds * 1000000 + micros,
    seconds * 1000 + math.floor(micros / 1000), seconds * 1000 + math.ceil(micros / 1000)
end

-- Lua writes large numbers as 2.5e+14; Redis and its readers want all digits.
local function int(n) return string.format('%.0f', n) end

local function option(name)
  return tonumber(call('HGET', OPTIONS, name) or DEFAULT[name])
end

local function count(name, n, group)
  if n > 0 then call('HINCRBY', STATS, group and name .. '@' .. group.name or name, n) end
end

-- A server at maxmemory refuses a script's first write if it can grow memory, and lets all that
-- follow a harmless one pass: what frees memory begins with this.
local function begin_freeing() call('ZREM', WAITING, '') end

local function wake() call('PUBLISH', WAKE, TOPIC) end

-- Whether the topic keeps a journal. Scripts that read other options anyway ask along with those.
local function is_journaled() return call('HGET', OPTIONS, 'journal') == '1' end

-- Appends events, {id, state, group's name or '', attempt, further field, value, ...} each, to the
-- journal, numbered without a hole. The queue never stops for it: an event that cannot be
-- written (a foreign hand took the key for something else) is counted, and its number is missing.
local function journal(events)
  if #events == 0 then return end
  begin_freeing() -- a script that has written nothing yet may stand here at maxmemory
  local number, failed = call('HINCRBY', STATS, 'journaled', #events) - #events, 0
  for i, event in ipairs(events) do
    local said = redis.pcall('XADD', EVENTS, '*', 'n', int(number + i), 'actor', ACTOR,
      'id', event[1], 'state', event[2], 'group', event[3], 'attempt', event[4], unpack(event, 5))
    if type(said) == 'table' and said.err then failed = failed + 1 end
  end
  count('journal_failed', failed)
end

local function head(zset)
  local first = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  return first[1] and tonumber(first[2])
end

-- How many more entries the group's stream may take: unread ones count, pending ones do not.
local function room(group, max_ready, wanted)
  local free = max_ready - call('XLEN', group.ready)
  if free >= wanted then return free end
  return free + call('XPENDING', group.ready, group.name)[1]
end

-- ids, due times and (where some failed before) failed attempts -> the group's stream and index.
local function add_ready(group, ids, dues, failed)
  local ready, index = group.ready, {}
  for i, id in ipairs(ids) do
    local before = failed and tonumber(failed[i] or 0) or 0
    index[2 * i - 1] = id
    if before > 0 then
      index[2 * i] = call('XADD', ready, '*', 'id', id, 'due', dues[i], 'attempt', before + 1)
    else
      index[2 * i] = call('XADD', ready, '*', 'id', id, 'due', dues[i])
    end
  end
  if #ids > 0 then call('HSET', group.entries, unpack(index)) end
end

local function failed_attempts(group, ids)
  if #ids == 0 or call('EXISTS', group.attempts) == 0 then return nil end
  return call('HMGET', group.attempts, unpack(ids))
end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return nil
end

-- The fields of one stream entry, or nil if it is gone.
local function read_entry(group, entry)
  local found = call('XRANGE', group.ready, entry, entry)
  return found[1] and found[1][2]
end

-- The fields of many entries, false where one is gone. They mostly lie side by side, in order.
local function read_entries(group, entries)
  local known, found = {}, {}
  local range = call('XRANGE', group.ready, entries[1], entries[#entries], 'COUNT', #entries)
  for _, item in ipairs(range) do known[item[1]] = item[2] end
  for i, entry in ipairs(entries) do
    found[i] = known[entry] or read_entry(group, entry) or false
  end
  return found
end

-- The pending record {entry, consumer, idle, deliveries} of an entry, or nil if not handed out.
local function pending(group, entry)
  return call('XPENDING', group.ready, group.name, entry, entry, 1)[1]
end

local function drop_entries(group, ids, entries)
  call('XACK', group.ready, group.name, unpack(entries))
  call('XDEL', group.ready, unpack(entries))
  if #ids > 0 then call('HDEL', group.entries, unpack(ids)) end
end

-- What a group remembers of ids beside their place; nothing is there on the happy path.
local function forget_failures(group, ids)
  if call('EXISTS', group.attempts, group.reasons, group.leases) == 0 then return end
  call('HDEL', group.attempts, unpack(ids))
  call('HDEL', group.reasons, unpack(ids))
  call('ZREM', group.leases, unpack(ids))
end

-- Takes an id out of every place of a group. Answers whether it stood in one.
local function take_out(group, id)
  local entry, found = call('HGET', group.entries, id), 0
  if entry then
    drop_entries(group, {id}, {entry})
    found = 1
  end
  found = found + call('ZREM', group.retry, id) + call('ZREM', group.garbage, id)
  forget_failures(group, {id})
  return found > 0
end

local function owes(group, id)
  return call('HEXISTS', group.entries, id) == 1 or call('ZSCORE', group.retry, id)
    or call('ZSCORE', group.garbage, id)
end

local function owed(id)
  for _, group in ipairs(groups) do
    if owes(group, id) then return true end
  end
  return false
end

-- Token and mark of a live message (nine characters), or '' if it is not live.
local function fence(body) return call('GETRANGE', body, 1, 9) end

local function is_partly_settled(mark_holder)
  local mark = string.sub(mark_holder, 9, 9)
  return mark == '+' or mark == 'R'
end

-- One of several groups is through with it: cancel and reschedule must know.
local function mark_partly_settled(body)
  local mark = call('GETRANGE', body, 9, 9)
  if mark == '-' then call('SETRANGE', body, 9, '+') end
  if mark == 'r' then call('SETRANGE', body, 9, 'R') end
end

local function tombstone(guard, state, due, attempts, now)
  return guard .. state .. ',' .. (due or '') .. ',' .. attempts .. ',' .. int(now)
end

-- The commands that set many keys at once, to expire at one instant, came late to both servers.
local HAS_MSETEX = (redis.VALKEY_VERSION_NUM or 0) >= 0x090100
  or not redis.VALKEY_VERSION_NUM and (redis.REDIS_VERSION_NUM or 0) >= 0x080400

-- The end is given as an instant: the server would turn a span into one, key by key. A user may
-- have been given rights when MSETEX was not there yet: half a settlement would lose the tombstones.
local function set_all(keys, values, expire_at)
  if HAS_MSETEX then
    local both = {}
    for i, key in ipairs(keys) do both[2 * i - 1], both[2 * i] = key, values[i] end
    both[#both + 1], both[#both + 2] = 'PXAT', expire_at
    if type(redis.pcall('MSETEX', #keys, unpack(both))) ~= 'table' then return end
  end
  for i, key in ipairs(keys) do call('SET', key, values[i], 'PXAT', expire_at) end
end

-- Tombstones last for the topic's retention, those of a send token that begins with '~' (a job
-- that may be run again long after) for its `dedupe_for`.
local function keep_tombstones(dones, tombstones)
  local settings = call('HMGET', OPTIONS, 'retention', 'dedupe_for')
  local retention = tonumber(settings[1] or DEFAULT.retention)
  local keys, values, lasting_keys, lasting = {}, {}, {}, {}
  for i, stone in ipairs(tombstones) do
    if string.byte(stone) == 126 then
      lasting_keys[#lasting_keys + 1], lasting[#lasting + 1] = dones[i], stone
    else
      keys[#keys + 1], values[#values + 1] = dones[i], stone
    end
  end
  local _, now = clock()
  if #keys > 0 and retention > 0 then set_all(keys, values, int(now + retention)) end
  if #lasting > 0 then
    local span = math.max(retention, tonumber(settings[2] or DEFAULT.dedupe_for))
    set_all(lasting_keys, lasting, int(now + span))
    call('HSET', OPTIONS, 'lasting', int(now + span)) -- a place that drains is kept until then
  end
end

-- Ends messages for good: bodies go, tombstones stay for a while.
local function finish(ids, bodies, dones, tombstones)
  if #ids == 0 then return end
  call('UNLINK', unpack(bodies))
  if call('EXISTS', POLICY, EXPIRY) > 0 then
    call('HDEL', POLICY, unpack(ids))
    call('ZREM', EXPIRY, unpack(ids))
  end
  keep_tombstones(dones, tombstones)
end

-- The pause before retry n by a policy such as '0,0,120000~0.2', or nil if there is none.
local policies = {}
local function nth_delay(policy, n)
  local known = policies[policy]
  if not known then
    known = {jitter = tonumber(string.match(policy, '~([%d.]+)') or 0)}
    for delay in string.gmatch(string.match(policy, '^[^~]*'), '%d+') do
      known[#known + 1] = tonumber(delay)
    end
    policies[policy] = known
  end
  return known[n] and math.ceil(known[n] * (1 + known.jitter * math.random()))
end

-- One failed attempt of each: to the group's retry, or to its garbage once the attempts are used
-- up. `delays[i]` is nil (by policy), milliseconds, or 'discard'; no id comes twice. Answers the
-- next due of each (nil: in garbage) and its failed attempts.
local function fail(group, ids, entries, delays, reasons, now)
  if #ids == 0 then return {}, {} end
  local failed = call('HMGET', group.attempts, unpack(ids))
  local own = call('EXISTS', POLICY) == 1 and call('HMGET', POLICY, unpack(ids)) or {}
  local settings = call('HMGET', OPTIONS, 'retry_delays', 'journal')
  local policy, journaled = settings[1] or DEFAULT.retry_delays, settings[2] == '1'
  local dues, attempts, notes, again, dead, dead_ids, events = {}, {}, {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    failed[i] = tonumber(failed[i] or 0) + 1
    local pause = nth_delay(own[i] or policy, failed[i])
    if pause and delays[i] ~= 'discard' then
      dues[i] = now + (tonumber(delays[i] or '') or pause)
      again[#again + 1] = int(dues[i])
      again[#again + 1] = id
    else
      dead[#dead + 1] = int(now)
      dead[#dead + 1] = id
      dead_ids[#dead_ids + 1] = id
    end
    attempts[2 * i - 1], attempts[2 * i] = id, failed[i]
    notes[2 * i - 1], notes[2 * i] = id, string.sub(reasons[i], 1, 1024)
    if journaled then
      events[i] = {id, 'garbage', group.name, failed[i], 'reason', notes[2 * i]}
      if dues[i] then
        events[i] = {id, 'retry', group.name, failed[i], 'reason', notes[2 * i],
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
  drop_entries(group, ids, entries)
  call('ZREM', group.leases, unpack(ids))
  count('retried', #again / 2, group)
  count('garbage', #dead_ids, group)
  journal(events)
  return dues, failed
end

-- Counts first hand-overs by lateness; `buckets` has one letter a message, a space where none.
local function count_lateness(group, buckets)
  while buckets ~= '' do
    local letter, n = string.sub(buckets, 1, 1), nil
    buckets, n = string.gsub(buckets, '[' .. letter .. ']', '')
    if letter ~= ' ' then count('late:' .. letter, n, group) end
  end
end

-- Whether a live message, not in waiting, may still be taken back: nil if so, else 'f' (a group has
-- it in flight) or 'd' (a group is through with it). A group declared after the message was
-- promoted never owed it. `garbage_counts` says that dead in one group is through, too.
local function why_not_taken_back(id, body, garbage_counts)
  if is_partly_settled(fence(body)) then return 'd' end
  local answer, places = 'd', 0
  for _, group in ipairs(groups) do
    local entry = call('HGET', group.entries, id)
    if entry then
      if pending(group, entry) then return 'f' end
      places = places + 1
    elseif call('ZSCORE', group.retry, id) then
      places = places + 1
    elseif call('ZSCORE', group.garbage, id) then
      if garbage_counts then return 'd' end
      places = places + 1
    end
  end
  return places == 0 and 'd' or nil
end

-- What is known of an id that is not live: 'c' if it was cancelled, 'd' settled, 'u' unknown.
local function verdict(done)
  local stone = call('GET', done)
  if not stone then return 'u' end
  return string.match(stone, '^.........(%a+)') == 'cancelled' and 'c' or 'd'
end
