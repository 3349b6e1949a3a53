-- prune: takes from the journal what every archive has, and what `journal_max` has no room for.
-- Guarantee: an event that an archive which still reports has not taken goes only for
-- `journal_max`, counted as lost if nobody has it; the queue never stops for the journal. Whole
-- nodes go, so a few events more are kept than need be, the last archived one always among them.
-- KEYS  the prelude's, then the record of the archives
-- ARGV  for how many ms after its last report an archive is waited for; the most events to take in
--       this call; n; n times the name of an archive
-- Returns {'OK', events removed, of those lost, events left, 1 if there is more to remove, else 0}
local ARCHIVED = KEYS[ID_KEYS + 1]
local hold, most = tonumber(ARGV[ARGS + 1]), tonumber(ARGV[ARGS + 2])
local _, now = clock()

-- The number of the first event that is there.
local function first_number()
  local found = call('XRANGE', EVENTS, '-', '+', 'COUNT', 1)
  return found[1] and tonumber(field(found[1][2], 'n')) or nil
end

local function is_before(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  a_ms, a_seq, b_ms, b_seq = tonumber(a_ms), tonumber(a_seq), tonumber(b_ms), tonumber(b_seq)
  return a_ms < b_ms or a_ms == b_ms and a_seq < b_seq
end

-- How far the slowest of the archives that still report has come, and the furthest of all.
local slowest, furthest = nil, 0
for i = 1, tonumber(ARGV[ARGS + 3]) do
  local record = call('HGET', ARCHIVED, ARGV[ARGS + 3 + i]) or ''
  local entry, number, at = string.match(record, '^(%d+%-%d+) (%d+) (%d+)$')
  if entry then
    furthest = math.max(furthest, tonumber(number))
    if tonumber(at) > now - hold and (not slowest or is_before(entry, slowest)) then
      slowest = entry
    end
  end
end

begin_freeing()
local before = first_number()
local removed = 0
if before and slowest then
  removed = call('XTRIM', EVENTS, 'MINID', '~', slowest, 'LIMIT', most)
end
local room = option('journal_max')
local over, lost = call('XLEN', EVENTS) - room, 0
if over > 0 and not slowest and removed < most then
  local first = first_number()
  local went = call('XTRIM', EVENTS, 'MAXLEN', '~', int(room), 'LIMIT', most - removed)
  if went > 0 then
    lost = math.max(0, math.min(went, first + went - 1 - furthest))
    call('HSET', ARCHIVED, '~trimmed', int(first + went - 1) .. ' ' .. int(now))
    count('journal_lost', lost)
  end
  removed = removed + went
end
return {'OK', removed, lost, call('XLEN', EVENTS), removed > 0 and 1 or 0}
