-- retry: in flight -> retry, or garbage once the attempts are used up (or at once: discard).
-- Guarantee: counts only for the delivery that the receipt names. The pause counts from now, not
-- from the due time, so retries never pile up without a gap.
-- KEYS  the prelude's
-- ARGV  own group's number; a random seed for jitter; lateness letters; n;
--       n times id, entry, delay ('' by policy, ms, or 'discard'), reason
-- Returns {'OK', now in ms, outcome and failed attempts of each: 'r<due>', n | 'g', n | 's', 0};
--       {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
math.randomseed(tonumber(ARGV[ARGS + 2]))
local buckets, n, first = ARGV[ARGS + 3], tonumber(ARGV[ARGS + 4]), ARGS + 4
local _, now = clock()
local retry_head = head(group.retry)
local ids = {}
for i = 1, n do ids[i] = ARGV[first + 4 * i - 3] end
local indexed = call('HMGET', group.entries, unpack(ids))
begin_freeing()

local reply, lateness, stale, earliest, seen = {'OK', int(now)}, {}, 0, nil, {}
for i = 1, n do
  local at = first + 4 * i
  local entry, delay = ARGV[at - 2], ARGV[at - 1]
  if indexed[i] ~= entry or seen[ids[i]] then
    stale = stale + 1
    reply[#reply + 1] = 's'
    reply[#reply + 1] = 0
  else
    seen[ids[i]] = true
    local outcome, due, failed =
      fail(group, ids[i], entry, delay ~= '' and delay or nil, ARGV[at], now)
    if due then earliest = math.min(earliest or due, due) end
    lateness[#lateness + 1] = string.sub(buckets, i, i)
    reply[#reply + 1] = due and outcome .. int(due) or outcome
    reply[#reply + 1] = failed
  end
end
count_lateness(group, table.concat(lateness))
count('stale', stale, group)
if earliest and (not retry_head or earliest < retry_head) then wake() end
return reply
