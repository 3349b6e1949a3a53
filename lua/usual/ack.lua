-- ack, the usual case: handled messages of a topic with one group, without failed attempts, ttls, own
-- policies and journal. Every other call falls through to ack.lua before anything is written.
-- Tables get their final size where they are created: one that grows costs more than the commands.
if GROUP_COUNT == 1 and ARGV[7] == 'acked' and ARGV[8] == '1' then
  local ready, entries, n = KEYS[9], KEYS[10], tonumber(ARGV[10])
  local declared, indexed = call('HKEYS', GROUPS), call('HMGET', entries, unpack(ARGV, 11, 10 + n))
  local settings = call('HMGET', OPTIONS, 'journal', 'retention')
  local is_usual = #declared == 1 and declared[1] == ARGV[5] and settings[1] ~= '1'
    and call('EXISTS', POLICY, EXPIRY, KEYS[13], KEYS[14], KEYS[15]) == 0
  for i = 1, n do
    is_usual = is_usual and indexed[i] == ARGV[10 + n + i] and string.byte(ARGV[10 + 2 * n + i]) ~= 126
  end
  if is_usual then
    local _, now = clock()
    call('XACK', ready, ARGV[5], unpack(indexed))
    call('XDEL', ready, unpack(indexed))
    call('HDEL', entries, unpack(ARGV, 11, 10 + n))
    call('UNLINK', unpack(KEYS, ID_KEYS + 1, ID_KEYS + n))
    local retention = tonumber(settings[2] or DEFAULT.retention)
    if retention > 0 then
      local stones, settled = {unpack(KEYS, ID_KEYS + 1, ID_KEYS + 2 * n + 2)}, int(now)
      for i = 1, n do
        stones[2 * i - 1], stones[2 * i] = KEYS[ID_KEYS + n + i], ARGV[10 + 2 * n + i] .. settled
      end
      set_all(stones, int(now + retention))
    end
    call('HINCRBY', STATS, 'acked@' .. ARGV[5], n)
    count_lateness({name = ARGV[5]}, string.sub(ARGV[9], 1, n))
    keep_highest(ARGV[5], string.sub(ARGV[9], n + 1))
    return {'OK', string.rep('a', n)}
  end
end
