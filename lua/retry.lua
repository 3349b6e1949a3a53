-- retry: in flight -> retry, or garbage after the last attempt (or immediately: discard).
-- Guarantee: applies only to the delivery that the receipt names. The pause counts from now, not
-- from the due time, so retries always have their gap. A repeated call returns the first answer. After
-- its record has expired, a failure that is still where the first call put it, with its attempt and
-- reason, is answered as before.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; a random seed for jitter; lateness letters and the highest lateness
--       to keep; n;
--       n times id, entry, attempt (0 to skip the search for an earlier call), delay ('' by policy, ms,
--       or 'discard'), reason (and after a zero byte a traceback, kept if the message ends in garbage)
-- Returns {'OK', now in ms, outcome and failed attempts of each: 'r<due>', n | 'g', n | 's', 0};
--       {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
math.randomseed(tonumber(ARGV[ARGS + 2]))
local buckets, n, first = ARGV[ARGS + 3], tonumber(ARGV[ARGS + 4]), ARGS + 4
local _, now = clock()
local retry_head = head(group.retry)
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 5 * i - 4] end
local indexed = call('HMGET', group.entries, unpack(ids))
allow_writes_at_maxmemory()

local held, entries, delays, reasons, lateness = {}, {}, {}, {}, {}
local number, seen = {}, {}
for i = 1, n do
  local at = first + 5 * i
  if indexed[i] == ARGV[at - 3] and not seen[ids[i]] then
    local k = #held + 1
    seen[ids[i]], number[i] = true, k
    held[k], entries[k], reasons[k] = ids[i], indexed[i], ARGV[at]
    if ARGV[at - 1] ~= '' then delays[k] = ARGV[at - 1] end
    lateness[k] = string.sub(buckets, i, i)
  end
end

-- The outcome of an earlier call whose record has expired: where it put the failure, or nil.
local function outcome_before(i)
  local id, attempt, why = ids[i], ARGV[first + 5 * i - 2], parted(ARGV[first + 5 * i])
  if attempt == '0' or seen[id] or call('HGET', group.attempts, id) ~= attempt
    or parted(call('HGET', group.reasons, id) or '') ~= why then return nil end
  if call('ZSCORE', group.garbage, id) then return 'g', attempt end
  local due = call('ZSCORE', group.retry, id)
  if due then return 'r' .. int(tonumber(due)), attempt end
  return nil
end

local dues, failed = fail(group, held, entries, delays, reasons)

local reply, earliest, stale = {'OK', int(now)}, nil, 0
for i = 1, n do
  local k = number[i]
  local due = k and dues[k]
  if due then earliest = math.min(earliest or due, due) end
  local outcome, attempts = due and 'r' .. int(due) or k and 'g', k and failed[k]
  if not k then outcome, attempts = outcome_before(i) end
  if not outcome then stale = stale + 1 end
  reply[2 * i + 1], reply[2 * i + 2] = outcome or 's', attempts or 0
end
count_lateness(group, table.concat(lateness))
if #held > 0 then keep_highest(group.name, string.sub(buckets, n + 1)) end
count('stale', stale, group)
if earliest and (not retry_head or earliest < retry_head) then wake() end
return #held > 0 and remember(reply) or reply
