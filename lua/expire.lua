-- expire: waiting, retry, ready past its ttl -> settled (expired).
-- Guarantee: re-checks each id that the caller listed; what is in flight finishes. In garbage a
-- message has no ttl any more.
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  1 if the envelopes of expired messages are wanted, else 0; n; n times id
-- Returns {'OK', letters, envelope or '' of each}: x expired, f in flight, n not past its ttl,
--       o no longer live; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local wanted = ARGV[ARGS + 1] == '1'
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local _, now = clock()
local letters, reply, expired = {}, {}, 0
begin_freeing()

-- Drops an id from a group unless it is in flight there. Answers whether it is.
local function drop_unless_in_flight(group, id, waits)
  local entry = call('HGET', group.entries, id)
  if entry and pending(group, entry) then return true end
  if entry then drop_entries(group, {id}, {entry}) end
  if entry or waits or call('ZREM', group.retry, id) == 1 then forget_failures(group, {id}) end
  return false
end

for i = 1, n do
  local id, body, done = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  local ends, guard = tonumber(call('ZSCORE', EXPIRY, id) or ''), fence(body)
  letters[i], reply[i] = 'n', ''
  if ends and guard == '' then
    call('ZREM', EXPIRY, id)
    letters[i] = 'o'
  elseif ends and ends <= now then
    local attempts, in_flight = 0, false
    local due = tonumber(call('ZSCORE', WAITING, id) or '')
    for _, group in ipairs(groups) do
      attempts = math.max(attempts, tonumber(call('HGET', group.attempts, id) or 0))
      in_flight = drop_unless_in_flight(group, id, due) or in_flight
    end
    if due then call('ZREM', WAITING, id) end
    if in_flight then
      letters[i] = 'f'
    elseif owed(id) then
      call('ZREM', EXPIRY, id)
    else
      if wanted then reply[i] = call('GET', body) end
      finish({id}, {body}, {done}, {tombstone(guard, 'expired', due and int(due), attempts, now)})
      letters[i], expired = 'x', expired + 1
    end
  end
end
count('expired', expired)
return {'OK', table.concat(letters), unpack(reply)}
