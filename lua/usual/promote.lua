-- promote, the usual case: one group with room for what is due, and a topic without ttls, failed
-- attempts and journal, which is not paused; a late message only if the topic has no policy for it.
-- Every other call falls through to promote.lua before anything is written.
-- Tables get their final size where they are created, or are reused: one that grows costs more than
-- the commands it serves.
if GROUP_COUNT == 1 then
  local ready, entries, retry, attempts = KEYS[9], KEYS[10], KEYS[11], KEYS[13]
  local declared = call('HKEYS', GROUPS)
  if #declared == 1 and declared[1] == ARGV[5] and call('EXISTS', EXPIRY, retry, attempts) == 0 then
    local settings = call('HMGET', OPTIONS, 'paused', 'max_ready', 'journal', 'promote_interval',
      'ack_timeout')
    local _, now = clock()
    local limit = math.max(1, math.min(tonumber(ARGV[6]), 250))
    -- What is due, and the ids to expect next: mostly about as many as this caller expected.
    local last = math.max(1, 2 * (#KEYS - ID_KEYS) - 1)
    local found = call('ZRANGE', WAITING, 0, last, 'WITHSCORES')
    if found[2 * last + 2] and tonumber(found[2 * last + 2]) <= now then
      found = call('ZRANGE', WAITING, 0, limit + 23, 'WITHSCORES')
    end
    local is_late = found[2] and now - tonumber(found[2]) >= MIN_LATE_MS
    local due = 0
    while due < limit and found[2 * due + 1] and tonumber(found[2 * due + 2]) <= now do due = due + 1 end
    local next_due, next_count = found[2 * due + 2] or '', math.max(1, math.min(math.floor(1.5 * due), 24))
    local next_ids = {unpack(found, 1, next_count)}
    for k = 1, next_count do next_ids[k] = found[2 * (due + k) - 1] end
    local interval = tonumber(settings[4] or DEFAULT.promote_interval) + 0
    if is_late then
      local set = call('HMGET', OPTIONS, 'late', 'own_late', 'ramp')
      is_late = set[1] or set[2] or set[3]
    end
    if settings[1] ~= '1' and settings[3] ~= '1' and not is_late then
      if due == 0 then
        local promoted = tonumber(call('HGET', STATS, 'promoted') or 0)
        return {'OK', 0, '', next_due, now, 0, 0, interval, promoted, next_ids}
      end
      local length, max_ready = call('XLEN', ready), tonumber(settings[2] or DEFAULT.max_ready)
      local unread = length
      if unread + due > max_ready then unread = length - call('XPENDING', ready, ARGV[5])[1] end
      if unread + due <= max_ready then
        begin_freeing()
        local ids = {unpack(found, 1, due)}
        local expected = length < BODIES_IN_ENTRIES and ID_KEYS + 1 or #KEYS + 1
        for k = 1, due do
          local id, body, key = found[2 * k - 1], '', expected
          while KEYS[key] and string.sub(KEYS[key], #WAITING - 1) ~= id do key = key + 1 end
          if KEYS[key] then
            body, expected = call('GETRANGE', KEYS[key], 0, BYTES_IN_ENTRY), key + 1
          end
          ids[k] = id
          if body ~= '' and #body <= BYTES_IN_ENTRY then
            found[2 * k] = call('XADD', ready, '*', 'id', id, 'due', found[2 * k],
              'ack', settings[5] or DEFAULT.ack_timeout, 'body', body)
          else
            found[2 * k] = call('XADD', ready, '*', 'id', id, 'due', found[2 * k])
          end
        end
        call('HSET', entries, unpack(found, 1, 2 * due))
        call('ZREM', WAITING, unpack(ids))
        local promoted = call('HINCRBY', STATS, 'promoted', due)
        return {'OK', due, '', next_due, now, 0, due == limit and 1 or 0, interval, promoted, next_ids}
      end
    end
  end
end
