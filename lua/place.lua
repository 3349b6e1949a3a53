-- place: opens or closes one place of a topic that is split; lets an older number of shards go.
-- Guarantee: a place follows the latest layout that it has heard of, whoever else is late.
-- KEYS  the prelude's
-- ARGV  what (open or close; of the topic itself: forget an older count, or renumber a layout that
--       was lost above the number given); the layout's number; the count to forget, or all that
--       were found, with commas between
-- Returns {'OK', the number of the latest layout that is known here; negative if that one has closed
--       this place}
local what, number, counts = ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2]), ARGV[ARGS + 3]
local LAYOUT = '^(%d+):(%d+):([%d,]*):([%d,]*)$'

-- Its places hold nothing any more: they are remembered for what they counted.
local function forget()
  local known, current, older, gone = string.match(call('HGET', OPTIONS, 'layout') or '', LAYOUT)
  if not known or tonumber(known) ~= number then return tonumber(known or '0') end
  local draining, found = {}, false
  for one in string.gmatch(older, '%d+') do
    if one == counts then found = true else draining[#draining + 1] = one end
  end
  if found then
    if gone ~= '' then gone = ',' .. gone end
    call('HSET', OPTIONS, 'layout', known .. ':' .. current .. ':'
      .. table.concat(draining, ',') .. ':' .. counts .. gone)
    call('HDEL', OPTIONS, 'emptied:' .. counts)
    call('PUBLISH', WAKE, TOPIC .. '~')
  end
  return number
end

-- The last layouts went with their server. What is there says nothing of where messages stand by
-- now: all counts that were found, and all that were ever used, are older ones that may hold some.
local function renumber()
  local known, current, older, gone = string.match(call('HGET', OPTIONS, 'layout') or '', LAYOUT)
  if not known then
    known, older, gone = '0', '', ''
    current = string.match(call('HGET', OPTIONS, 'shards') or '', '^%d+$') or '1'
  end
  if tonumber(known) > number then return tonumber(known) end
  local seen, draining = {[current] = true}, {}
  for one in string.gmatch(older .. ',' .. counts .. ',' .. gone, '%d+') do
    if not seen[one] then
      seen[one], draining[#draining + 1] = true, one
      call('HDEL', OPTIONS, 'emptied:' .. one)
    end
  end
  call('HSET', OPTIONS, 'layout',
    int(number + 1) .. ':' .. current .. ':' .. table.concat(draining, ',') .. ':')
  call('PUBLISH', WAKE, TOPIC .. '~')
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
return {'OK', known}
