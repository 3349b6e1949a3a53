-- place: opens or closes one place of a topic that is split; lets an older number of shards go.
-- Guarantee: a place follows the latest layout that it has heard of, whoever else is late.
-- KEYS  the prelude's
-- ARGV  what (open or close; of the topic itself: forget an older count, or renumber the layout
--       above the number given); the layout's number; the count to forget, or 0
-- Returns {'OK', the number of the latest layout that is known here}
local what, number, count = ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2]), ARGV[ARGS + 3]

-- Its places hold nothing any more: they are remembered for what they counted.
local function forget()
  local known, current, older, gone =
    string.match(call('HGET', OPTIONS, 'layout') or '', '^(%d+):(%d+):([%d,]*):([%d,]*)$')
  if not known or tonumber(known) ~= number then return tonumber(known or '0') end
  local draining, found = {}, false
  for one in string.gmatch(older, '%d+') do
    if one == count then found = true else draining[#draining + 1] = one end
  end
  if found then
    if gone ~= '' then gone = ',' .. gone end
    call('HSET', OPTIONS, 'layout', known .. ':' .. current .. ':'
      .. table.concat(draining, ',') .. ':' .. count .. gone)
    call('HDEL', OPTIONS, 'emptied:' .. count)
    call('PUBLISH', WAKE, TOPIC .. '~')
  end
  return number
end

local function renumber()
  local known, rest = string.match(call('HGET', OPTIONS, 'layout') or '', '^(%d+)(:.*)$')
  if not known then return 0 end
  if tonumber(known) > number then return tonumber(known) end
  call('HSET', OPTIONS, 'layout', int(number + 1) .. rest)
  return number + 1
end

begin_freeing()
if what == 'renumber' then return {'OK', renumber()} end
if what == 'forget' then return {'OK', forget()} end
local known = tonumber(call('HGET', OPTIONS, 'accepts') or '0')
if math.abs(known) < number then
  known = what == 'open' and number or -number
  call('HSET', OPTIONS, 'accepts', int(known))
  wake()
end
return {'OK', math.abs(known)}
