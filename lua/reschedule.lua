-- reschedule: waiting, retry, ready (not delivered) -> waiting with a new due time, in one step.
-- Guarantee: only if no group has the message in flight or in garbage, or has settled it. Failed
-- attempts stay counted; a ttl moves with the due time. A repeated call returns the first answer,
-- even if the message was delivered in the meantime.
-- Features: keys (the messages have one, whose list was read).
-- KEYS  the prelude's, the call's record among them, then for each message: body, done
-- ARGV  the layout's number ('' to skip the check); the number of the part of their key's list that the
--       caller read ('' to skip the check); that part; '1' if the caller chose the due times by the
--       messages' windows, else ''; n; n times id, due ('+ms' is a delay, else epoch ms; 'ms@was' only if it waits until `was`)
-- Returns {'OK', letters}: s rescheduled, f in flight, d done, u unknown; {'WINDOW'} if a message
--       may have a window by which the caller did not choose; {'LISTED'} if that part of the list has
--       changed; {'SHARDS'}; {'GROUPS', ...}
local changed = answered() or misplaced(ARGV[ARGS + 1]) or changed_topic()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 5]), ARGS + 5
if USES.keys then
  local part = ARGV[ARGS + 2]
  if part ~= '' and has_other_list(ARGV[first + 1], part, ARGV[ARGS + 3]) then return {'LISTED'} end
end
if ARGV[ARGS + 4] == '' then
  if (call('HGET', OPTIONS, 'window') or '') ~= '' then return {'WINDOW'} end
  for i = 1, n do
    -- A window is the first of a message's headers.
    local head = call('GETRANGE', KEYS[ID_KEYS + 2 * i - 1], 15, 29)
    if head == '{"lisa-window":' then return {'WINDOW'} end
  end
end
local _, now = clock()
local waiting_head, earliest, moved = head(WAITING), nil, 0

-- The due time of a ready message; nil in retry, which stores only the time of the next attempt.
local function due_in_groups(id)
  for _, group in ipairs(groups) do
    local entry = call('HGET', group.entries, id)
    local fields = entry and read_entry(group, entry)
    if fields and not field(fields, 'attempt') then return tonumber(field(fields, 'due')) end
    local due = parked_due(group, id)
    if due and call('HEXISTS', group.attempts, id) == 0 then return due end
  end
  return nil
end

local letters, events, journaled = {}, {}, is_journaled()
allow_writes_at_maxmemory()
for i = 1, n do
  local id, body = ARGV[first + 2 * i - 1], KEYS[ID_KEYS + 2 * i - 1]
  if fence(body) == '' then
    local known = verdict(KEYS[ID_KEYS + 2 * i])
    letters[i] = known == 'u' and 'u' or 'd'
  else
    local before = tonumber(call('ZSCORE', WAITING, id) or '')
    letters[i] = not before and why_not_taken_back(id, body, true) or 's'
    local due, was_due = string.match(ARGV[first + 2 * i], '^([^@]+)@?(%d*)$')
    if was_due ~= '' and before ~= tonumber(was_due) then letters[i] = 'd' end
    if letters[i] == 's' then
      due = due_from(due)
      local was = before or due_in_groups(id)
      local ends = tonumber(call('ZSCORE', EXPIRY, id) or '')
      if ends and (was or due > now) then
        call('ZADD', EXPIRY, int(ends + due - (was or now)), id)
      end
      call('ZADD', WAITING, int(due), id)
      if not before then
        for _, group in ipairs(groups) do
          local entry = call('HGET', group.entries, id)
          if entry then drop_entries(group, {id}, {entry}) end
          call('ZREM', group.retry, id)
          leave_lane(group, id)
        end
      end
      earliest = math.min(earliest or due, due)
      moved = moved + 1
      if journaled then
        events[moved] = {id, 'rescheduled', '', 0, 'due', int(due)}
        ends = ends and call('ZSCORE', EXPIRY, id)
        if ends then events[moved][7], events[moved][8] = 'expires', int(tonumber(ends)) end
      end
    end
  end
end
count('rescheduled', moved)
journal(events)
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
local reply = {'OK', table.concat(letters)}
return moved > 0 and remember(reply) or reply
