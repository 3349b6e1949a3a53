-- inspect: the state of ids, in every group.
-- Guarantee: changes nothing; all groups are read at the same time. If bodies are requested, a call
-- reads at most BYTES_PER_CALL of them, or one larger body; the caller calls again for the other
-- messages.
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  the layout's number ('' to skip the check);
--       1 to read bodies, else 0 (then only the envelope's head is returned); n; n times id
-- Returns {'OK', now in ms, for each of the first ids {envelope or '', tombstone or '', due in waiting or '',
--       end of its ttl or '', {group, state, due, failed attempts, consumer, idle in ms, reason,
--       entry}, ...}}; state is ready, in_flight, retry, parked or garbage, and for garbage due is the
--       time of death; {'SHARDS'}; {'GROUPS', ...}
local changed = misplaced(ARGV[ARGS + 1]) or changed_topic()
if changed then return changed end

local wanted, n, first = ARGV[ARGS + 2] == '1', tonumber(ARGV[ARGS + 3]), ARGS + 3
local _, now = clock()

local function state_of(group, id)
  local entry = call('HGET', group.entries, id)
  if entry then
    local fields, held = read_entry(group, entry), pending(group, entry)
    local due = fields and field(fields, 'due') or ''
    if held then return 'in_flight', due, held[2], held[3], entry end
    return 'ready', due, '', '', entry
  end
  local due = call('ZSCORE', group.retry, id)
  if due then return 'retry', int(tonumber(due)), '', '', '' end
  due = parked_due(group, id)
  if due then return 'parked', int(due), '', '', '' end
  due = call('ZSCORE', group.garbage, id)
  if due then return 'garbage', int(tonumber(due)), '', '', '' end
  return nil
end

local reply = {'OK', int(now)}
if wanted then n = count_within_budget(ID_KEYS + 1, 2, n) end
for i = 1, n do
  local id, body = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1]
  local due, ends = call('ZSCORE', WAITING, id), call('ZSCORE', EXPIRY, id)
  local row = {
    wanted and (call('GET', body) or '') or call('GETRANGE', body, 0, 14),
    call('GET', KEYS[ID_KEYS + 2 * i]) or '',
    due and int(tonumber(due)) or '', ends and int(tonumber(ends)) or '',
  }
  for _, group in ipairs(groups) do
    local state, when, consumer, idle, entry = state_of(group, id)
    if state then
      row[#row + 1] = {group.name, state, when, call('HGET', group.attempts, id) or '0', consumer,
        idle, call('HGET', group.reasons, id) or '', entry}
    end
  end
  reply[#reply + 1] = row
end
return reply
