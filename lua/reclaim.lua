-- reclaim: in flight past the ack timeout -> retry or garbage; or, without an attempt, -> ready.
-- Guarantee: a delivery that a handler process held counts as an attempt only if its handler is known
-- to have begun (see extend). Others may have been read ahead: they return to ready as suspects, which are
-- decoded and handled one at a time, each with an extend before it. An entry without a message is cleared
-- and does not block the others; a delivery's own lease is respected; each call checks one window, and the
-- caller continues from the cursor. If the clock shows a later time than the caller considers possible,
-- nothing is reclaimed. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; a random seed for jitter; first id of the window ('-': own leases
--       first, '0-0': entries alone, or '(' and the last one seen); last id of the range
--       ('0-0': own leases alone); the window's size (50 at most, and as many leases); the
--       latest ms that the clock may show, or ''
-- Returns {'OK', 'later' (the clock shows more: nothing was done), 'ahead' (deliveries are in the
--       future of the clock) or '', cursor or '' at the end, ms until the next lease of this window
--       ends or -1, entries cleared, suspects returned to ready, id, the due time of its delivery or
--       '', outcome ('r<due>' or 'g'), failed attempts, ...}; {'GROUPS', ...}
local changed = answered() or changed_topic()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
math.randomseed(tonumber(ARGV[ARGS + 2]))
local from, to = ARGV[ARGS + 3], ARGV[ARGS + 4]
local most = math.min(tonumber(ARGV[ARGS + 5]), 50)
local timeout = option('ack_timeout')
local _, now = clock()
local latest = tonumber(ARGV[ARGS + 6])
if latest and now > latest then return {'OK', 'later', '', -1, 0, 0} end
local retry_head = head(group.retry)
local cleared, next_end, clock_state = {}, -1, ''
local ids, entries, delivered, reasons, seen = {}, {}, {}, {}, {}
local back, old, dues_back, suspects = {}, {}, {}, {}

local function add(id, entry, fields, reason)
  if seen[id] then return end
  seen[id] = true
  local k = #ids + 1
  ids[k], entries[k], reasons[k] = id, entry, reason or 'ack timeout'
  delivered[k] = fields and string.match(field(fields, 'due') or '', '^%-?%d+$') or ''
end

local function note_end(ms)
  if next_end < 0 or ms < next_end then next_end = math.max(ms, 0) end
end

-- Deliveries whose own lease has ended.
local function scan_leases()
  local over = call('ZRANGEBYSCORE', group.leases, '-inf', int(now), 'LIMIT', 0, most)
  local indexed = #over > 0 and call('HMGET', group.entries, unpack(over))
  for i, id in ipairs(over) do
    local entry = indexed[i]
    if entry and pending(group, entry) then
      add(id, entry, read_entry(group, entry))
    else
      call('ZREM', group.leases, id)
    end
  end
  local rest = call('ZRANGEBYSCORE', group.leases, '-inf', '+inf', 'WITHSCORES', 'LIMIT', #ids, 1)
  if #over == most then note_end(0) elseif rest[2] then note_end(tonumber(rest[2]) - now) end
end

-- Whether the process announces when handlers of suspects begin; older ones, and pulls, do not.
local function announces(consumer) return string.sub(consumer, -#HANDLER_SUFFIX) == HANDLER_SUFFIX end

-- Counts a delivery as an attempt, or returns its message to ready as a suspect.
local function judge(id, item, fields)
  local entry, consumer = item[1], item[2]
  if item[4] >= BEGUN then return add(id, entry, fields, field(fields, 'suspect') and SUSPECT_REASON) end
  if not announces(consumer) then return add(id, entry, fields) end
  if seen[id] then return end
  seen[id] = true
  back[#back + 1], old[#old + 1], suspects[id] = id, entry, '1'
  dues_back[#back] = field(fields, 'due') or int(now)
end

local function scan_overdue(items)
  local overdue = {}
  for i, item in ipairs(items) do overdue[i] = item[1] end
  local found, wanted = read_entries(group, overdue), {}
  for i, fields in ipairs(found) do wanted[i] = fields and field(fields, 'id') or '' end
  local indexed = call('HMGET', group.entries, unpack(wanted))
  local has_leases = call('EXISTS', group.leases) == 1
  for i, entry in ipairs(overdue) do
    local id = wanted[i]
    if id == '' or indexed[i] ~= entry then
      cleared[#cleared + 1] = entry
    elseif not (has_leases and call('ZSCORE', group.leases, id)) then
      judge(id, items[i], found[i])
    end
  end
end

-- When deliveries with the topic's ack timeout end. The next end of an own lease is the head of
-- `leases`, however long ago the entry was delivered.
local function scan_rest(held, lefts, ahead)
  local found = call('EXISTS', group.leases) == 1 and read_entries(group, held) or {}
  for i, left in ipairs(lefts) do
    local id = found[i] and field(found[i], 'id')
    if not (id and call('ZSCORE', group.leases, id)) then
      note_end(left)
      if ahead[held[i]] then clock_state = 'ahead' end
    end
  end
end

allow_writes_at_maxmemory()
if from == '-' then scan_leases() end
local window = call('XPENDING', group.ready, group.name, from, to, most)
local cursor = #window == most and '(' .. window[#window][1] or ''
local overdue, held, lefts = {}, {}, {}
for _, item in ipairs(window) do
  local left = timeout - item[3]
  if left > 0 then
    held[#held + 1], lefts[#lefts + 1] = item[1], left
  else
    overdue[#overdue + 1] = item
  end
end
if #held > 0 then scan_rest(held, lefts, delivered_ahead(group, window)) end
if #overdue > 0 then scan_overdue(overdue) end
if #cleared > 0 then drop_entries(group, {}, cleared) end

if #back > 0 then
  local failed = failed_attempts(group, back)
  add_ready(group, paired(back, dues_back), failed, suspects)
  drop_entries(group, {}, old)
  count('released', #back, group)
  if is_journaled() then
    local events = {}
    for k, id in ipairs(back) do
      local attempt = failed and tonumber(failed[k] or 0) + 1 or 1
      events[k] = {id, 'ready', group.name, attempt, 'due', dues_back[k], 'reason', 'suspect'}
    end
    journal(events)
  end
end

local dues, failed = fail(group, ids, entries, {}, reasons)
local reply, earliest = {}, nil
for i, id in ipairs(ids) do
  if dues[i] then earliest = math.min(earliest or dues[i], dues[i]) end
  reply[4 * i - 3], reply[4 * i - 2], reply[4 * i] = id, delivered[i], failed[i]
  reply[4 * i - 1] = dues[i] and 'r' .. int(dues[i]) or 'g'
end
count('reclaimed', #ids + #back, group)
count('cleared', #cleared, group)
if earliest and (not retry_head or earliest < retry_head) then wake() end
reply = {'OK', clock_state, cursor, next_end, #cleared, #back, unpack(reply)}
-- After an outage a caller may repeat the call up to one ack timeout later.
return #ids + #back > 0 and remember(reply, timeout) or reply
