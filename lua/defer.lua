-- defer: in flight -> retry, until the message's window opens, without an attempt.
-- Guarantee: applies only to the delivery that the receipt names, and only while Redis's clock is
-- between the two given instants; otherwise the delivery returns to ready as a new entry. A repeated
-- call returns the first answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  own group's number; n; n times id, entry, closes (epoch ms), opens (epoch ms)
-- Returns {'OK', letters}: w waits for its window, y released, s stale; {'GROUPS', ...}
local changed = answered() or changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local wanted = {}
for i = 1, n do wanted[i] = ARGV[first + 4 * i - 3] end
local indexed = call('HMGET', group.entries, unpack(wanted))

local letters, number, seen = {}, {}, {}
local ids, entries, closes, opens = {}, {}, {}, {}
for i = 1, n do
  local id, at = wanted[i], first + 4 * i
  letters[i] = 's'
  if indexed[i] == ARGV[at - 2] and not seen[id] then
    local k = #ids + 1
    seen[id], number[k] = true, i
    ids[k], entries[k] = id, indexed[i]
    closes[k], opens[k] = tonumber(ARGV[at - 1]), tonumber(ARGV[at])
  end
end
if #ids == 0 then return {'OK', table.concat(letters)} end

begin_freeing()
local outcomes, events = end_outside(group, ids, entries, closes, opens)
for k, letter in ipairs(outcomes) do letters[number[k]] = letter end
if is_journaled() then journal(events) end
return remember({'OK', table.concat(letters)})
