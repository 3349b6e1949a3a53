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

local held, entries, delays, reasons, lateness = {}, {}, {}, {}, {}
local number, seen = {}, {}
for i = 1, n do
  local at = first + 4 * i
  if indexed[i] == ARGV[at - 2] and not seen[ids[i]] then
    local k = #held + 1
    seen[ids[i]], number[i] = true, k
    held[k], entries[k], reasons[k] = ids[i], indexed[i], ARGV[at]
    if ARGV[at - 1] ~= '' then delays[k] = ARGV[at - 1] end
    lateness[k] = string.sub(buckets, i, i)
  end
end
local dues, failed = fail(group, held, entries, delays, reasons, now)

local reply, earliest = {'OK', int(now)}, nil
for i = 1, n do
  local k = number[i]
  local due = k and dues[k]
  if due then earliest = math.min(earliest or due, due) end
  reply[2 * i + 1] = due and 'r' .. int(due) or k and 'g' or 's'
  reply[2 * i + 2] = k and failed[k] or 0
end
count_lateness(group, table.concat(lateness))
count('stale', n - #held, group)
if earliest and (not retry_head or earliest < retry_head) then wake() end
return reply
