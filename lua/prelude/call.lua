-- prelude: these files precede every script; this one reads the common KEYS and ARGV. The loader
-- omits unused paragraphs.
--
-- KEYS  1-8 the topic's: waiting, policy, expiry, options, groups, stats, keyed, events
--       then seven for each group: ready, entries, retry, garbage, attempts, reasons, leases
--       then, for a call that uses lanes, the topic's limits, and five for each group: lanes, parked,
--       queues, turns, closed
--       then the keys of single messages, as documented in the script's header
--       then, for a call whose answer is stored, the call's record
-- ARGV  1 the wake channel, 2 the topic, 3 the actor (the caller, for the journal), 4 the number of
--       groups, then their names, then the script's own; "n each of a, b" are columns: all a, then all b
--       then, if there is a record, how long it is kept, in ms
--
-- The loader replaces fields of `DEFAULT` by the default topic options of these names. Before this file
-- it defines the constants of `core.model.options` that a script names, such as `BYTES_PER_CALL`, the
-- maximum bytes of bodies that one call reads.
-- Blocks such as `if USES.ttl then` are left out of the scripts for topics and calls without this feature.
-- A script that finds that it lacks one changes nothing and returns {'FEATURES', name}: the caller takes
-- note and calls again. A block that is there without need changes no result.
-- Every script that moves messages into or out of groups first compares the given groups with the declared
-- ones, and returns {'GROUPS', name, ...} if they differ: the caller updates its list and calls
-- again. Thus every key is declared, and no group is ever omitted. For a topic with lanes, these scripts
-- also need the feature `lanes`.
local call, KEYS, ARGV = redis.call, KEYS, ARGV -- locals are faster than globals
local WAITING, POLICY, EXPIRY, OPTIONS, GROUPS, STATS, KEYED, EVENTS =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local WAKE, TOPIC, ACTOR, GROUP_COUNT = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local ARGS = 4 + GROUP_COUNT
local LANES_AT = 9 + 7 * GROUP_COUNT
local ID_KEYS = LANES_AT - 1
if USES.lanes then
  ID_KEYS = LANES_AT + 5 * GROUP_COUNT
end

local groups = {}
for i = 1, GROUP_COUNT do
  local k = 1 + 7 * i
  groups[i] = {
    name = ARGV[4 + i], ready = KEYS[k + 1], entries = KEYS[k + 2], retry = KEYS[k + 3],
    garbage = KEYS[k + 4], attempts = KEYS[k + 5], reasons = KEYS[k + 6], leases = KEYS[k + 7],
  }
end
if USES.lanes then
  for i, group in ipairs(groups) do
    local k = LANES_AT - 4 + 5 * i
    group.lanes, group.parked, group.queues, group.turns, group.closed =
      KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], KEYS[k + 4]
  end
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

-- A table for n values that are all to be written: one that grows costs more than some commands.
local function sized(n) return {unpack(ARGV, 1, n)} end

-- A caller that lost the reply repeats the call and receives the first answer, from the call's record:
-- the parts of the reply, each preceded by its length. Only a call that changed something writes a
-- record; others can simply run again.
local function remember(reply, longer)
  local parts = {}
  for i, part in ipairs(reply) do parts[i] = string.len(part) .. ':' .. part end
  local kept = tonumber(ARGV[#ARGV]) + (longer or 0)
  call('SET', KEYS[#KEYS], table.concat(parts), 'PX', string.format('%.0f', kept))
  return reply
end

-- The stored reply of this call if it ran before, else nil.
local function answered()
  local record = call('GET', KEYS[#KEYS])
  if not record then return nil end
  local reply, from = {}, 1
  while from <= string.len(record) do
    local length, first = string.match(record, '^(%d+):()', from)
    from = first + tonumber(length)
    reply[#reply + 1] = string.sub(record, first, from - 1)
  end
  return reply
end

-- A topic may be split over several shards. A shard accepts new messages only from callers that know
-- the number of its layout, `accepts`; a negative number means that the shard is closed. A caller that
-- asks every shard in turn passes ''.
local function misplaced(believed)
  if believed == '' or (call('HGET', OPTIONS, 'accepts') or '0') == believed then return nil end
  return {'SHARDS'}
end

-- A topic's layout is 'number:count:older counts:empty counts' (see core.model.sharding).
local function read_layout()
  return string.match(call('HGET', OPTIONS, 'layout') or '', '^(%d+):(%d+):([%d,]*):([%d,]*)$')
end

local function write_layout(number, count, older, gone)
  call('HSET', OPTIONS, 'layout', table.concat({number, count, older, gone}, ':'))
  call('PUBLISH', WAKE, TOPIC .. '~')
end

-- A list of counts without one of them, and whether the list had that one.
local function without(counts, one)
  local left, found = {}, false
  for count in string.gmatch(counts, '%d+') do
    if count == one then found = true else left[#left + 1] = count end
  end
  return table.concat(left, ','), found
end
