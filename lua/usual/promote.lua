-- promote, the usual case: one group with room, up to 50 messages due, and a topic without ttls, failed
-- attempts and journal, which is not paused; a late message only if the topic has no policy for it.
-- Every other call falls through to promote.lua before anything is written.
if GROUP_COUNT == 1 and tonumber(ARGV[6]) > 50 then
  local ready, entries, retry, attempts = KEYS[9], KEYS[10], KEYS[11], KEYS[13]
  local declared = call('HKEYS', GROUPS)
  if #declared == 1 and declared[1] == ARGV[5] and call('EXISTS', EXPIRY, retry, attempts) == 0 then
    local settings = call('HMGET', OPTIONS, 'paused', 'max_ready', 'journal', 'promote_interval',
      'ack_timeout')
    local _, now = clock()
    local found = call('ZRANGE', WAITING, 0, 1, 'WITHSCORES')
    if found[4] and tonumber(found[4]) <= now then
      found = call('ZRANGE', WAITING, 0, 18, 'WITHSCORES')
      if found[22] and tonumber(found[22]) <= now then
        found = call('ZRANGE', WAITING, 0, 58, 'WITHSCORES')
      end
    end
    local is_late = found[2] and now - tonumber(found[2]) >= MIN_LATE_MS
    local due = 0
    while found[2 * due + 1] and tonumber(found[2 * due + 2]) <= now do due = due + 1 end
    local next_due, next_ids = found[2 * due + 2] or '', {}
    for k = due + 1, due + math.min(math.max(due, 1), 8) do next_ids[k - due] = found[2 * k - 1] end
    local interval = tonumber(settings[4] or DEFAULT.promote_interval) + 0
    if is_late then
      local policies = call('HMGET', OPTIONS, 'late', 'own_late', 'ramp')
      is_late = policies[1] or policies[2] or policies[3]
    end
    if due <= 50 and settings[1] ~= '1' and settings[3] ~= '1' and not is_late then
      if due == 0 then
        local promoted = tonumber(call('HGET', STATS, 'promoted') or 0)
        return {'OK', 0, '', next_due, int(now), 0, 0, interval, promoted, next_ids}
      end
      local length = call('XLEN', ready)
      if length + due <= tonumber(settings[2] or DEFAULT.max_ready) then
        begin_freeing()
        local ids, index, expected = {}, {}, {}
        if length < BODIES_IN_ENTRIES then
          for k = ID_KEYS + 1, #KEYS do expected[string.sub(KEYS[k], #WAITING - 1)] = KEYS[k] end
        end
        for k = 1, due do
          local id, body = found[2 * k - 1], ''
          if expected[id] then body = call('GETRANGE', expected[id], 0, BYTES_IN_ENTRY) end
          ids[k], index[2 * k - 1] = id, id
          if body ~= '' and #body <= BYTES_IN_ENTRY then
            index[2 * k] = call('XADD', ready, '*', 'id', id, 'due', found[2 * k],
              'ack', settings[5] or DEFAULT.ack_timeout, 'body', body)
          else
            index[2 * k] = call('XADD', ready, '*', 'id', id, 'due', found[2 * k])
          end
        end
        call('HSET', entries, unpack(index))
        call('ZREM', WAITING, unpack(ids))
        local promoted = call('HINCRBY', STATS, 'promoted', due)
        return {'OK', due, '', next_due, int(now), 0, 0, interval, promoted, next_ids}
      end
    end
  end
end
