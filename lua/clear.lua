-- clear: deletes every key of a shard that is no longer part of its topic (see absorb), or of a topic.
-- Guarantee: a shard that accepts messages, still holds any, or has a further group is not changed; nor
-- is a topic that holds messages, has a further group or another layout.
-- KEYS  the prelude's, with all groups of the shard, then its consumers, history, archived, confirm
--       and throttled; for a topic also its schedules, ticks and local times
-- ARGV  the number of the layout that does not include the shard; 1 to delete a topic, whose `accepts`
--       is that number, else 0
-- Returns {'OK', 1 if no key is left, else 0}
if not USES.lanes then
  if call('HGET', OPTIONS, 'lanes') == '1' then return {'FEATURES', 'lanes'} end
end
local number, is_topic = tonumber(ARGV[ARGS + 1]), ARGV[ARGS + 2] == '1'
local accepts = tonumber(call('HGET', OPTIONS, 'accepts') or '0')
local held, given = call('EXISTS', WAITING), {}
for _, group in ipairs(groups) do
  given[group.name] = true
  held = held + call('EXISTS', group.entries, group.retry, group.garbage) + count_parked(group)
end
for _, name in ipairs(call('HKEYS', GROUPS)) do
  if not given[name] then return {'OK', 0} end
end
local is_in_use = accepts > 0 or -accepts > number
if is_topic then is_in_use = accepts ~= number end
if is_in_use or held > 0 then return {'OK', 0} end
call('UNLINK', unpack(KEYS))
return {'OK', 1}
