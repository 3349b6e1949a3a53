-- open: right after XREADGROUP: reads the bodies and the time of delivery by Redis's clock; or,
-- outside a message's window: in flight -> retry, until the window opens.
-- Guarantee: an entry is opened only while the index names it. An entry whose message is gone is
-- cleared and never delivered; if the topic is paused, entries return to ready as new entries. A call
-- reads at most BYTES_PER_CALL of bodies, or one larger body: it opens the first entries, and the
-- caller calls again for the rest. A repeated call returns the same and is not journaled twice. A late
-- caller names its consumer: leases that the consumer still holds restart in the same step, so that
-- no message is reclaimed right before it is handled. A message with a window is opened only if the
-- caller knows when the window closes, and only before that instant by Redis's clock.
-- Features: late (the consumer is named), journal, exceptions (entries of a topic that is paused or has
-- ttls, without a message, with windows, or with an ack timeout of their own).
-- KEYS  the prelude's, the call's record among them, then for each entry: body
-- ARGV  own group's number; own ack timeout in ms or '' for the topic's; the consumer whose leases
--       restart, or ''; n; n each of id, entry, closes, opens (the last two may be absent: epoch ms by
--       which the message must be handed over, and when its window opens next; '' without a window)
-- Returns {'OK', now in us, ack timeout in ms, paused 0/1, letters (x past its ttl, w outside its
--       window, or -), body or false for each opened entry}; {'WINDOW'} if a message may have a
--       window, and the caller gave none; {'GROUPS', ...}; {'FEATURES', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local own_timeout, late, n = ARGV[ARGS + 2], ARGV[ARGS + 3], tonumber(ARGV[ARGS + 4])
local ID, ENTRY = ARGS + 4, ARGS + 4 + n
local CLOSES, OPENS = ENTRY + n, ENTRY + 2 * n
local knows_windows = #ARGV > CLOSES + 1
n = count_within_budget(ID_KEYS + 1, 1, n)
local us, now = clock()
local settings = call('HMGET', OPTIONS, 'ack_timeout', 'paused', 'journal', 'window', 'lanes')
if USES.lanes then
  lanes_in_use = settings[5] == '1'
else
  if settings[5] == '1' then return {'FEATURES', 'lanes'} end
end
local timeout = own_timeout ~= '' and own_timeout or settings[1] or DEFAULT.ack_timeout
local paused = settings[2] == '1'
local indexed = call('HMGET', group.entries, unpack(ARGV, ID + 1, ID + n))
local found = call('MGET', unpack(KEYS, ID_KEYS + 1, ID_KEYS + n))
local has_ttls = call('EXISTS', EXPIRY) == 1

if not knows_windows and not paused then
  if settings[4] and settings[4] ~= '' then return {'WINDOW'} end
  for i = 1, n do
    -- A window is the first of a message's headers.
    if found[i] and string.sub(found[i], 16, 30) == '{"lisa-window":' then return {'WINDOW'} end
  end
end

local is_plain = own_timeout == '' and not paused and not has_ttls and not knows_windows
for i = 1, n do is_plain = is_plain and found[i] and indexed[i] == ARGV[ENTRY + i] end
if not USES.exceptions then
  if not is_plain then return {'FEATURES', 'exceptions'} end
end
if not USES.journal then
  if settings[3] == '1' then return {'FEATURES', 'journal'} end
end

if USES.late then
  if late ~= '' then
    allow_writes_at_maxmemory()
    for i = 1, n do
      local entry = ARGV[ENTRY + i]
      local held = indexed[i] == entry and pending(group, entry)
      if held and held[2] == late then
        call('XCLAIM', group.ready, group.name, late, 0, entry, 'JUSTID')
      end
    end
  end
end

local events, journaled, entry_fields

local function tell(i, state)
  local fields = entry_fields[i] or {}
  local due, attempt = field(fields, 'due'), field(fields, 'attempt') or '1'
  local event = {ARGV[ID + i], state, group.name, attempt}
  if due then event[5], event[6] = 'due', due end
  if due and attempt == '1' and state == 'in_flight' then
    event[7], event[8] = 'late', int(us - 1000 * tonumber(due))
  end
  events[#events + 1] = event
end

if USES.journal then
  -- Only the journal needs to distinguish a call from its repeat.
  events, journaled = {}, settings[3] == '1' and not answered()
  if journaled then entry_fields = read_entries(group, {unpack(ARGV, ENTRY + 1, ENTRY + n)}) end
  if journaled and is_plain then
    for i = 1, n do tell(i, 'in_flight') end
    journal(events)
    remember({'OK'})
  end
end

-- Opens entries of which some are not simply handed over. Returns the letters.
local function open_others()
  local letters, gone, gone_ids, kept = {}, {}, {}, {}
  local away, away_entries, dues = {}, {}, {}
  for i = 1, n do
    letters[i] = '-'
    if indexed[i] ~= ARGV[ENTRY + i] or not found[i] then
      gone[#gone + 1] = ARGV[ENTRY + i]
      if indexed[i] == ARGV[ENTRY + i] then
        gone_ids[#gone_ids + 1] = ARGV[ID + i]
        if journaled then
          events[#events + 1] = {ARGV[ID + i], 'lost', group.name, 0, 'reason', 'no-body', 'end', 1}
        end
      end
      found[i] = false
    else
      if has_ttls then
        local ends = call('ZSCORE', EXPIRY, ARGV[ID + i])
        if ends and tonumber(ends) <= now then letters[i] = 'x' end
      end
      local until_ms = knows_windows and not paused and tonumber(ARGV[CLOSES + i])
      if until_ms and now >= until_ms and letters[i] == '-' then
        letters[i], found[i] = 'w', false
        local k = #away + 1
        away[k], away_entries[k] = ARGV[ID + i], ARGV[ENTRY + i]
        local opens = tonumber(ARGV[OPENS + i])
        dues[k] = now < opens and opens
      else
        kept[#kept + 1] = i
      end
      local state = paused and 'ready' or letters[i] == '-' and 'in_flight'
      if journaled and state then tell(i, state) end
    end
  end
  if #gone > 0 then
    allow_writes_at_maxmemory()
    drop_entries(group, gone_ids, gone)
    if #gone_ids > 0 then forget_failures(group, gone_ids) end
    count('cleared', #gone, group)
  end
  if #away > 0 then
    allow_writes_at_maxmemory()
    local told = put_back(group, away, away_entries, dues, {})
    if settings[3] == '1' then
      for _, event in ipairs(told) do events[#events + 1] = event end
    end
  end
  if paused and #kept > 0 then
    allow_writes_at_maxmemory()
    local back, dues, old, suspects = {}, {}, {}, {}
    for k, i in ipairs(kept) do
      local entry = ARGV[ENTRY + i]
      local fields = read_entry(group, entry)
      back[k], old[k], dues[k] = ARGV[ID + i], entry, fields and field(fields, 'due') or int(now)
      suspects[back[k]] = fields and field(fields, 'suspect')
      found[i] = false
    end
    add_ready(group, paired(back, dues), failed_attempts(group, back), suspects)
    drop_entries(group, {}, old)
    call('ZREM', group.leases, unpack(back))
  elseif own_timeout ~= '' then
    allow_writes_at_maxmemory()
    for _, i in ipairs(kept) do
      call('ZADD', group.leases, int(now + tonumber(own_timeout)), ARGV[ID + i])
    end
  end
  if USES.journal then
    journal(events)
    if #events > 0 then remember({'OK'}) end
  end
  return table.concat(letters)
end

local letters = string.rep('-', n)
if USES.exceptions then
  if not is_plain then letters = open_others() end
end
return {'OK', int(us), timeout, paused and 1 or 0, letters, unpack(found, 1, n)}
