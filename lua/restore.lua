-- restore: restores messages to their state before their server was lost.
-- Guarantee: restores only ids that are neither live nor settled here, so it is safe to repeat, and
-- to run under traffic. The topic's capacity does not apply: accepted messages stay accepted.
-- A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them, then for each message: body, done
-- ARGV  the layout's number ('' to skip the check);
--       n; n times id, envelope, due, end of its ttl or '', '=' and its own policies (may be empty:
--       no retries) or '', its states as text ('' in waiting; else for each group that owes it
--       'number:kind:score:attempts' separated by spaces, the kind r for retry or g for garbage), its
--       last failure's reason
-- Returns {'OK', letters}: y restored, l live already, s settled; {'UNDECLARED'} if a state names
--       group 0, which means that the group is not declared; {'SHARDS'};
--       {'GROUPS', ...}
local changed = answered() or misplaced(ARGV[ARGS + 1]) or changed_groups()
if changed then return changed end

local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local letters, events, journaled, restored, latest = {}, {}, is_journaled(), 0, 0
for i = 1, n do
  if string.find(' ' .. ARGV[first + 7 * i - 1], ' 0:', 1, true) then return {'UNDECLARED'} end
end

local function tell(id, i, group, attempts, due, more)
  if not journaled then return end
  local at = first + 7 * i
  local event = {id, 'restored', group, attempts, 'due', due, 'envelope', ARGV[at - 5]}
  for _, part in ipairs(more) do event[#event + 1] = part end
  if ARGV[at - 3] ~= '' then event[#event + 1], event[#event + 2] = 'expires', ARGV[at - 3] end
  if ARGV[at - 2] ~= '' then
    event[#event + 1], event[#event + 2] = 'policy', string.sub(ARGV[at - 2], 2)
  end
  events[#events + 1] = event
end

local function put_in_group(id, i, number, kind, score, attempts)
  local group, why = groups[tonumber(number)], ARGV[first + 7 * i]
  if kind == 'r' then
    call('ZADD', group.retry, score, id)
  else
    call('ZADD', group.garbage, score, id)
  end
  if tonumber(attempts) > 0 then call('HSET', group.attempts, id, attempts) end
  if tonumber(attempts) > 0 or kind == 'g' and why ~= '' then
    call('HSET', group.reasons, id, string.sub(why, 1, 1024))
  end
  -- In retry a group has its own due time, which the next restore must find.
  local name, due = 'garbage', ARGV[first + 7 * i - 4]
  if kind == 'r' then name, due = 'retry', score end
  tell(id, i, group.name, attempts, due, {'place', name, 'reason', why})
end

for i = 1, n do
  local at, body, done = first + 7 * i, KEYS[ID_KEYS + 2 * i - 1], KEYS[ID_KEYS + 2 * i]
  local id, states = ARGV[at - 6], ARGV[at - 1]
  if call('EXISTS', body) == 1 then
    letters[i] = 'l'
  elseif call('EXISTS', done) == 1 then
    letters[i] = 's'
  else
    letters[i], restored = 'y', restored + 1
    call('SET', body, ARGV[at - 5])
    list_by_key({id}, true)
    if states == '' then
      call('ZADD', WAITING, ARGV[at - 4], id)
      tell(id, i, '', 0, ARGV[at - 4], {})
    end
    for number, kind, score, attempts in string.gmatch(states, '(%d+):(%a):(%-?%d+):(%d+)') do
      put_in_group(id, i, number, kind, score, attempts)
    end
    if ARGV[at - 3] ~= '' then call('ZADD', EXPIRY, ARGV[at - 3], id) end
    if ARGV[at - 2] ~= '' then
      put_policy(id, string.sub(ARGV[at - 2], 2))
      latest = math.max(latest, tonumber(string.match(ARGV[at - 2], ';%d*,%d*,(%d+)$') or 0))
    end
  end
end
if latest > tonumber(call('HGET', OPTIONS, 'ordered_after') or 0) then
  call('HSET', OPTIONS, 'ordered_after', int(latest))
end
count('restored', restored)
journal(events)
local reply = {'OK', table.concat(letters)}
if restored > 0 then
  remember(reply)
  wake()
end
return reply
