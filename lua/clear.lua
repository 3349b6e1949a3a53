-- clear: deletes every key of a shard that is no longer part of its topic (see absorb).
-- Guarantee: a shard that accepts messages, or still holds any, is not changed.
-- KEYS  the prelude's, with all groups of the shard, then its history, archived and confirm
-- ARGV  the number of the layout that does not include the shard
-- Returns {'OK', 1 if no key is left, else 0}
local number = tonumber(ARGV[ARGS + 1])
local accepts = tonumber(call('HGET', OPTIONS, 'accepts') or '0')
local held = call('EXISTS', WAITING)
for _, group in ipairs(groups) do
  held = held + call('EXISTS', group.entries, group.retry, group.garbage)
end
if accepts > 0 or -accepts > number or held > 0 then return {'OK', 0} end
call('UNLINK', unpack(KEYS))
return {'OK', 1}
