-- cancel: waiting, retry, ready, garbage -> settled (cancelled).
-- Guarantee: truthful. 'cancelled' only if no group has the message in flight or is through with
-- it; else nothing is changed. A repeated call finds its own tombstone and answers the same.
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  n; n times id
-- Returns {'OK', letters}: c cancelled, f in flight, d done, u unknown; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 1]), ARGS + 1
local _, now = clock()
local letters, cancelled = {}, 0
begin_freeing()
for i = 1, n do
  local id, body, done = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  local guard = fence(body)
  if guard == '' then
    letters[i] = verdict(done)
  else
    local due = call('ZSCORE', WAITING, id)
    letters[i] = not due and why_not_taken_back(id, body, false) or 'c'
    if letters[i] == 'c' then
      local attempts = 0
      for _, group in ipairs(groups) do
        attempts = math.max(attempts, tonumber(call('HGET', group.attempts, id) or 0))
        take_out(group, id)
      end
      if due then call('ZREM', WAITING, id) end
      local stone = tombstone(guard, 'cancelled', due and int(tonumber(due)), attempts, now)
      finish({id}, {body}, {done}, {stone})
      cancelled = cancelled + 1
    end
  end
end
count('cancelled', cancelled)
return {'OK', table.concat(letters)}
