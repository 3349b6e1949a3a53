-- enqueue, the usual case: one message with a generated id, due later, without ttl or own policy, to a
-- topic without capacity, window or journal. Every other call falls through to enqueue.lua before anything
-- is written.
if ARGV[ARGS + 4] == 'new' and ARGV[ARGS + 5] == '1' and ARGV[ARGS + 9] == '0'
  and ARGV[ARGS + 10] == '0' then
  local body, believed, due, envelope = KEYS[ID_KEYS + 1], ARGV[ARGS + 1], ARGV[ARGS + 7], ARGV[ARGS + 8]
  local settings = call('HMGET', OPTIONS, 'capacity', 'max_body_bytes', 'journal', 'accepts', 'window')
  local window = (settings[5] or '') .. (ARGV[ARGS + 11] or '')
  if not settings[1] and settings[3] ~= '1' and window == '' and (believed == '' or believed == (settings[4] or '0'))
    and #envelope - 15 <= tonumber(settings[2] or DEFAULT.max_body_bytes) then
    local _, now, now_up = clock()
    local at = tonumber(due)
    if string.byte(due) == 43 and at > 0 then at = now_up + at end
    if at > now and call('EXISTS', KEYS[ID_KEYS + 2]) == 0
      and call('MSETNX', body, envelope) == 1 then
      local first = call('ZRANGE', WAITING, 0, 0, 'WITHSCORES')
      call('ZADD', WAITING, int(at), string.sub(body, #WAITING - 1))
      call('HINCRBY', STATS, 'sent', 1)
      if not first[1] or at < tonumber(first[2]) then wake() end
      return {'OK', 'a'}
    end
  end
end
