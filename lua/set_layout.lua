-- set_layout: opens or closes one shard of a split topic; on the topic, forgets or renumbers layouts.
-- Guarantee: a shard follows the latest layout that it has seen; late calls change nothing. A
-- repeated call finds the layout that the first one wrote, and returns the same.
-- KEYS  the prelude's
-- ARGV  what (open or close; on the topic itself: forget an older count, or renumber a lost layout
--       above the given number); the layout's number; the count to forget, or all counts
--       found, separated by commas; the last journal number of a shard to open, from
--       before its keys were deleted, else 0
-- Returns {'OK', the number of the latest layout known here; negative if that layout closed
--       this shard}
local what, number, counts = ARGV[ARGS + 1], tonumber(ARGV[ARGS + 2]), ARGV[ARGS + 3]

-- The shards of this count are empty: they are only read for their counters.
local function forget()
  local known, current, older, gone = read_layout()
  if not known or tonumber(known) ~= number then return tonumber(known or '0') end
  local draining, found = without(older, counts)
  if found then
    if gone ~= '' then gone = ',' .. gone end
    write_layout(known, current, draining, counts .. gone)
    call('HDEL', OPTIONS, 'emptied:' .. counts)
  end
  return number
end

-- The last layouts were lost with their server. The remaining one does not say where messages are
-- now: treat all counts that were found or ever used as older ones that may hold messages.
local function renumber()
  local known, current, older, gone = read_layout()
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
  write_layout(int(number + 1), current, table.concat(draining, ','), '')
  return number + 1
end

allow_writes_at_maxmemory()
if what == 'renumber' then return {'OK', renumber()} end
if what == 'forget' then return {'OK', forget()} end
local known = tonumber(call('HGET', OPTIONS, 'accepts') or '0')
if math.abs(known) < number then
  known = what == 'open' and number or -number
  call('HSET', OPTIONS, 'accepts', int(known))
  local last = ARGV[ARGS + 4]
  if what == 'open' and last ~= '0' and call('HEXISTS', STATS, 'journaled') == 0 then
    call('HSET', STATS, 'journaled', last)
  end
  wake()
end
return {'OK', known}
