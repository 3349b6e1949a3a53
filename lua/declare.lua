-- declare: adds a group to a topic, reading from the stream's first id, and creates its stream.
-- Guarantee: safe to repeat; repairs a deleted stream or consumer group. A group whose removal was
-- interrupted is not revived, nor are its failure counts: other calls have moved its messages
-- without it. A new group is refused if the topic already has `max_groups`; declared groups are
-- kept, however many there are. A repeated call returns the first answer.
-- KEYS  the prelude's, with the one group to declare, and the call's record
-- ARGV  1 to only repair a declared group, 2 to only restore a group that owes messages although it
--       was never removed, else 0; 1 if `max_groups` applies, else 0
-- Returns {'OK', 1 if the group was not declared before, else 0}; {'OWES'} if it owes messages from
--       before its removal; {'MANY', groups, most} if there are too many
local before = answered()
if before then return before end

local group = groups[1]
local declared, mark = call('HEXISTS', GROUPS, group.name), 'removing:' .. group.name
if declared == 0 then
  local only, marked = ARGV[ARGS + 1], call('HEXISTS', OPTIONS, mark) == 1
  local owes = call('EXISTS', group.entries, group.retry, group.garbage) > 0
  if only == '1' or only == '2' and (marked or not owes) then return {'OK', 0} end
  if marked and owes then return {'OWES'} end
  local most, there = option('max_groups'), call('HLEN', GROUPS)
  if ARGV[ARGS + 2] == '1' and there >= most then return {'MANY', there, most} end
end
local _, now = clock()
allow_writes_at_maxmemory()
local made = redis.pcall('XGROUP', 'CREATE', group.ready, group.name, '0', 'MKSTREAM')
if made.err and not string.find(tostring(made.err), 'BUSYGROUP', 1, true) then return made end
local new = 1 - declared
if new == 1 then
  call('HSET', GROUPS, group.name, int(now))
  if call('HDEL', OPTIONS, mark) == 1 then
    call('UNLINK', group.attempts, group.reasons, group.leases)
  end
end
if new == 1 or not made.err then wake() end
local reply = {'OK', new}
return new == 1 and remember(reply) or reply
