-- defer: in flight -> retry, for a while, without an attempt: as its handler or client asks, or until
-- the message's window opens.
-- Guarantee: applies only to the delivery that the receipt names. A delay counts from now. A message
-- waits for its window only while Redis's clock is between the instants at which the window closes and
-- opens; otherwise the delivery returns to ready as a new entry. A repeated call returns the first
-- answer. After its record has expired, a message that is still where the first call put it is answered
-- as before.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; n; n times id, entry, closes (epoch ms; '' for a delay; 'rest' to park the
--       message while its lane rests), opens (epoch ms, or the delay in ms), reason (of a delay or rest)
-- Returns {'OK', outcome of each: 'd<due>' deferred, 'y' released, 's' stale}; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local wanted = {}
for i = 1, n do wanted[i] = ARGV[first + 5 * i - 4] end
local indexed = call('HMGET', group.entries, unpack(wanted))
local _, now, now_up = clock()

-- When a delivery waits until, or false if its window is open.
local function due_of(closes, opens)
  if closes == '' then return opens == 0 and now or now_up + opens end
  return tonumber(closes) <= now and now < opens and opens
end

-- The outcome of an earlier call whose record has expired.
local function outcome_before(id, entry)
  local _, deferred = history(call('HGET', group.reasons, id))
  local due = deferred == entry and tonumber(call('ZSCORE', group.retry, id) or '')
  if USES.lanes then
    local key = lane_of(id)
    local rest = deferred == entry and parked_due(group, id) and lanes_of(group, {key})[key].rest or 0
    if rest > 0 then due = math.ceil(rest / 1000) end
  end
  return due and 'd' .. int(due) or 's'
end

local reply, seen = {'OK'}, {}
local ids, entries, dues, reasons, rests = {}, {}, {}, {}, {}
local any_rests = false
for i, id in ipairs(wanted) do
  local at = first + 5 * i
  local entry = ARGV[at - 3]
  if indexed[i] == entry and not seen[id] then
    local closes, opens, k = ARGV[at - 2], tonumber(ARGV[at - 1]), #ids + 1
    seen[id], ids[k], entries[k] = true, id, entry
    if closes == 'rest' then
      dues[k], rests[k], any_rests = false, opens, true
      reply[i + 1] = 'd' .. int(now_up + opens)
    else
      dues[k] = due_of(closes, opens)
      reply[i + 1] = dues[k] and 'd' .. int(dues[k]) or 'y'
    end
    if closes == '' or closes == 'rest' then reasons[k] = ARGV[at] end
  else
    reply[i + 1] = outcome_before(id, entry)
  end
end
if #ids == 0 then return reply end
if not USES.lanes then
  if any_rests then return {'FEATURES', 'lanes'} end
end

allow_writes_at_maxmemory()
local events = put_back(group, ids, entries, dues, reasons, rests)
if is_journaled() then journal(events) end
return remember(reply)
