-- read: events of the journal between two entries, forwards or backwards.
-- Guarantee: changes nothing. A call returns at most BYTES_PER_CALL, or one larger event. The size of
-- the next event is not known in advance, so events are read one by one at first, and up to eight at
-- once after small ones; what does not fit is dropped.
-- KEYS  the prelude's
-- ARGV  the start; the end (both as for XRANGE); 1 to read backwards, else 0;
--       the maximum number of events
-- Returns {'OK', 1 if nothing is left to read, else 0, {entry, {field, value, ...}}, ...}
local AT_ONCE = 8
local start, stop, left = ARGV[ARGS + 1], ARGV[ARGS + 2], tonumber(ARGV[ARGS + 4])
local backwards = ARGV[ARGS + 3] == '1'
local reply, bytes, count = {'OK', 0}, 0, 1
while left > 0 do
  count = math.min(count, left)
  local before, items = bytes, nil
  if backwards then
    items = call('XREVRANGE', EVENTS, start, stop, 'COUNT', count)
  else
    items = call('XRANGE', EVENTS, start, stop, 'COUNT', count)
  end
  for _, item in ipairs(items) do
    for _, part in ipairs(item[2] or {}) do bytes = bytes + #part end
    if bytes > BYTES_PER_CALL and #reply > 2 then return reply end
    reply[#reply + 1] = item
  end
  if #items < count then
    reply[2] = 1
    break
  end
  start, left = '(' .. items[count][1], left - count
  count = (bytes - before) * AT_ONCE * 2 < BYTES_PER_CALL and math.min(2 * count, AT_ONCE) or 1
end
return reply
