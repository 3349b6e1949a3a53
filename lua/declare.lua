-- declare: adds a group to a topic, from the stream's first id on, and makes its stream.
-- Guarantee: safe to repeat; mends a stream or a group that a foreign hand took away; a group whose
-- removal was cut short is not revived, nor the failures that it counted: other calls have moved
-- its messages without asking for it.
-- KEYS  the prelude's, with the one group to declare
-- ARGV  1 only to mend a group that is declared, 2 only to bring one back that owes messages though
--       nobody removed it, else 0
-- Returns {'OK', 1 if the group was not declared before, else 0}; {'OWES'} if it owes messages since
--       its removal
local group = groups[1]
local declared, mark = call('HEXISTS', GROUPS, group.name), 'removing:' .. group.name
if declared == 0 then
  local only, marked = ARGV[ARGS + 1], call('HEXISTS', OPTIONS, mark) == 1
  local owes = call('EXISTS', group.entries, group.retry, group.garbage) > 0
  if only == '1' or only == '2' and (marked or not owes) then return {'OK', 0} end
  if marked and owes then return {'OWES'} end
end
local _, now = clock()
begin_freeing()
local made = redis.pcall('XGROUP', 'CREATE', group.ready, group.name, '0', 'MKSTREAM')
if made.err and not string.find(tostring(made.err), 'BUSYGROUP', 1, true) then return made end
local new = call('HSETNX', GROUPS, group.name, int(now))
if new == 1 and call('HDEL', OPTIONS, mark) == 1 then
  call('UNLINK', group.attempts, group.reasons, group.leases)
end
if new == 1 or not made.err then wake() end
return {'OK', new}
