-- read: events of the journal between two entries, forwards or backwards.
-- Guarantee: changes nothing. A call reads at most BYTES_PER_CALL, or one larger event. Events are
-- read one by one, because the size of the next one is not known in advance.
-- KEYS  the prelude's
-- ARGV  the start; the end (both as for XRANGE); 1 to read backwards, else 0;
--       the maximum number of events
-- Returns {'OK', 1 if nothing is left to read, else 0, {entry, {field, value, ...}}, ...}
local start, stop, most = ARGV[ARGS + 1], ARGV[ARGS + 2], tonumber(ARGV[ARGS + 4])
local backwards, reply, bytes = ARGV[ARGS + 3] == '1', {'OK', 0}, 0
for _ = 1, most do
  local item
  if backwards then
    item = call('XREVRANGE', EVENTS, start, stop, 'COUNT', 1)[1]
  else
    item = call('XRANGE', EVENTS, start, stop, 'COUNT', 1)[1]
  end
  if not item then
    reply[2] = 1
    break
  end
  for _, part in ipairs(item[2] or {}) do bytes = bytes + #part end
  if bytes > BYTES_PER_CALL and #reply > 2 then break end
  reply[#reply + 1] = item
  start = '(' .. item[1]
end
return reply
