-- prune: removes journal events that every archive has read, or that exceed `journal_max`.
-- Guarantee: an event that a reporting archive has not read is kept. `journal_max` applies only if no
-- archive reports; events removed by it that no archive has are counted as lost. XTRIM removes whole
-- nodes, so slightly more events are kept than necessary, including the last archived one.
-- A repeated call continues the removal; the topic's counters include what the first one removed.
-- KEYS  the prelude's, then the record of the archives
-- ARGV  how many ms after its last report an archive still counts as reporting; the maximum number
--       of events to remove; n; n times the name of an archive
-- Returns {'OK', events removed, of those lost, events left, 1 if there is more to remove, else 0}
local ARCHIVED = KEYS[ID_KEYS + 1]
local hold, most = tonumber(ARGV[ARGS + 1]), tonumber(ARGV[ARGS + 2])
local _, now = clock()

-- The number of the first event, skipping entries without a number.
local function first_number()
  local from = '-'
  for _ = 1, 100 do
    local found = call('XRANGE', EVENTS, from, '+', 'COUNT', 1)[1]
    if not found then return nil end
    local number = tonumber(field(found[2], 'n'))
    if number then return number end
    from = '(' .. found[1]
  end
  return nil
end

-- The positions of the slowest reporting archive and of the furthest archive.
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

allow_writes_at_maxmemory()
local removed, lost, room = 0, 0, option('journal_max')
if slowest then
  removed = call('XTRIM', EVENTS, 'MINID', '~', slowest, 'LIMIT', most)
elseif call('XLEN', EVENTS) > room then
  removed = call('XTRIM', EVENTS, 'MAXLEN', '~', int(room), 'LIMIT', most)
end
if removed > 0 and not slowest then
  -- Numbers and entries may each have gaps: what is left shows which numbers were removed.
  local left = first_number() or tonumber(call('HGET', STATS, 'journaled') or 0) + 1
  lost = math.max(0, math.min(removed, left - 1 - furthest))
  call('HSET', ARCHIVED, '~trimmed', int(left - 1) .. ' ' .. int(now))
  count('journal_lost', lost)
end
return {'OK', removed, lost, call('XLEN', EVENTS), removed > 0 and 1 or 0}
