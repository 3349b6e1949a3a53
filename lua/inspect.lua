-- inspect: where an id stands, in every group.
-- Guarantee: changes nothing; all groups are seen at one instant.
-- KEYS  the prelude's, then for each message: body, done
-- ARGV  the layout's number ('' for no matter which);
--       1 if bodies are wanted, else 0 (then only the envelope's head comes); n; n times id
-- Returns {'OK', now in ms, for each id {envelope or '', tombstone or '', due in waiting or '',
--       end of its ttl or '', {group, place, due, failed attempts, consumer, idle in ms, reason,
--       entry}, ...}}; place is ready, in_flight, retry or garbage, and for garbage due is the
--       time of death; {'SHARDS'}; {'GROUPS', ...}
local changed = misplaced(ARGV[ARGS + 1]) or changed_groups()
if changed then return changed end

local wanted, n, first = ARGV[ARGS + 2] == '1', tonumber(ARGV[ARGS + 3]), ARGS + 3
local _, now = clock()

local function place_of(group, id)
  local entry = call('HGET', group.entries, id)
  if entry then
    local fields, held = read_entry(group, entry), pending(group, entry)
    local due = fields and field(fields, 'due') or ''
    if held then return 'in_flight', due, held[2], held[3], entry end
    return 'ready', due, '', '', entry
  end
  local due = call('ZSCORE', group.retry, id)
  if due then return 'retry', int(tonumber(due)), '', '', '' end
  due = call('ZSCORE', group.garbage, id)
  if due then return 'garbage', int(tonumber(due)), '', '', '' end
  return nil
end

local reply = {'OK', int(now)}
for i = 1, n do
  local id, body = ARGV[first + i], KEYS[ID_KEYS + 2 * i - 1]
  local due, ends = call('ZSCORE', WAITING, id), call('ZSCORE', EXPIRY, id)
  local row = {
    wanted and (call('GET', body) or '') or call('GETRANGE', body, 0, 14),
    call('GET', KEYS[ID_KEYS + 2 * i]) or '',
    due and int(tonumber(due)) or '', ends and int(tonumber(ends)) or '',
  }
  for _, group in ipairs(groups) do
    local place, when, consumer, idle, entry = place_of(group, id)
    if place then
      row[#row + 1] = {group.name, place, when, call('HGET', group.attempts, id) or '0', consumer,
        idle, call('HGET', group.reasons, id) or '', entry}
    end
  end
  reply[#reply + 1] = row
end
return reply
