-- coalesce: new -> waiting, or a new body for the message of the same key that no group has begun with.
-- Guarantee: the messages of these sends share two ids of their key, and at most one is unstarted: it
-- has the body of the last send. A message that has begun stays as it is, and the next send takes the
-- other id. Never early: instants are rounded up. What is due keeps its place if its body changes. A
-- repeated call returns the first answer. A call that exceeds the capacity, or max_per_key, writes nothing.
-- KEYS  the prelude's, the call's record among them; throttled; then for each message: body and done of
--       its key's first id, body and done of the second
-- ARGV  the layout's number, as known to the caller (see enqueue); send token; 1 to leave keys alone
--       that have no live message here, else 0; n; n each of rule, envelope;
--       the number of ttls, then pairs of message number and ttl in ms;
--       the number of messages with own policies, then pairs of message number and policies
-- Returns {'OK', outcomes, numbers of the ids}, one letter per message: a accepted, r replaced, f replaced
--       in flight (both ids are), b body updated and due time kept, u unknown here;
--       {'FULL', live, capacity}; {'KEYFULL', key, live, max_per_key}; {'LARGE', message number, size, limit}; {'SHARDS'}; {'GROUPS', ...}
local changed = answered() or misplaced(ARGV[ARGS + 1]) or changed_topic()
if changed then return changed end

local THROTTLED = KEYS[ID_KEYS + 1]
local token, only_known, n = ARGV[ARGS + 2], ARGV[ARGS + 3] == '1', tonumber(ARGV[ARGS + 4])
local RULES, ENVELOPES = ARGS + 4, ARGS + 4 + n
local _, now, now_up = clock()
local settings = call('HMGET', OPTIONS, 'max_body_bytes', 'capacity', 'journal', 'max_per_key')

local limit = tonumber(settings[1] or DEFAULT.max_body_bytes)
for i = 1, n do
  local size = body_size(ARGV[ENVELOPES + i])
  if size > limit then return {'LARGE', i, size, limit} end
end

-- Values by message number, and the index of the argument after them.
local function numbered(at)
  local values, last = {}, at + 2 * tonumber(ARGV[at])
  for k = at + 1, last, 2 do values[tonumber(ARGV[k])] = ARGV[k + 1] end
  return values, last + 1
end

local ttls, policies_at = numbered(ENVELOPES + n + 1)
local policies = numbered(policies_at)

-- The order in which a send takes an id, by the stage of its message. All but the first two take the place
-- of an older message.
local RANKS = {unstarted = 1, free = 2, dead = 3, started = 4, in_flight = 5}

-- What is known of one id: `due` while it waits; `answer` if an earlier call with this token wrote it.
local function read_slot(k)
  local slot = {body = KEYS[k], done = KEYS[k + 1], id = id_of(KEYS[k])}
  local live = fence(slot.body)
  local known = live ~= '' and live or call('GETRANGE', slot.done, 0, 8)
  if string.sub(known, 1, 8) == token then
    local mark = string.lower(string.sub(known, 9, 9))
    slot.answer = string.find(mark, '^[rfb]') and mark or 'a'
  end
  if live == '' then
    slot.stage = 'free'
  else
    slot.stage, slot.due = stage_of(slot.body)
    slot.stage = slot.stage or 'dead'
  end
  return slot
end

-- The id that the sends of a key take; false if the key has no live message here and has to.
local function choose(first)
  local one, other = read_slot(first), read_slot(first + 2)
  if one.answer then return one end
  if other.answer then return other end
  if only_known and one.stage == 'free' and other.stage == 'free' then return false end
  return RANKS[other.stage] < RANKS[one.stage] and other or one
end

-- The id of each message, by its number; messages of one key share it.
local slots, by_key, new, most_per_key = {}, {}, 0, not only_known and tonumber(settings[4] or '')
for i = 1, n do
  local first = ID_KEYS + 4 * i - 2
  local slot = by_key[KEYS[first]]
  if slot == nil then
    slot = choose(first)
    by_key[KEYS[first]] = slot
    if slot and not slot.answer and (slot.stage == 'free' or slot.stage == 'dead') then new = new + 1 end
    if most_per_key and slot and not slot.answer and slot.stage == 'free' then
      local key = split_id(slot.id)
      local live = count_of_key(key)
      if live >= most_per_key then return {'KEYFULL', key, live, most_per_key} end
    end
  end
  slots[i] = slot
end

local capacity = tonumber(settings[2] or '') -- empty: unlimited
if capacity and new > 0 and not only_known then
  local live = count_live()
  if live + new > capacity then return {'FULL', live, capacity} end
end

-- The instant before which the next throttled message of a key is not due. An instant beyond the interval
-- is that of a longer one, of a message that never ran, or of a clock that was set back since.
local function allowed_at(key, interval)
  return math.min(tonumber(call('ZSCORE', THROTTLED, key) or now), now_up + interval)
end

-- The due time by a rule: 'd5000,60000' is 5 s after this send, but at most a minute after the burst's
-- first (the latter may be missing); 't5000' is now, but 5 s after the key's last message; 'l+5000' is as
-- for enqueue. `before`: that of the unstarted message, which the last two keep; nil for a new one. Gives
-- also the instant of the first send, or that before which the key's next message is not due.
local function due_by(rule, slot, before)
  local kind, span, most = string.match(rule, '^(%a)([^,]*),?(%d*)$')
  if kind == 'd' then
    local first = tonumber(before and call('HGET', KEYED, slot.id) or now_up)
    local due = now_up + tonumber(span)
    return most == '' and due or math.min(due, first + tonumber(most)), first, nil
  end
  if before then return before, nil, nil end
  if kind == 'l' then return due_from(span), nil, nil end
  local at = allowed_at(split_id(slot.id), tonumber(span))
  if at > now then return at, nil, at + tonumber(span) end
  return now, nil, now_up + tonumber(span)
end

-- Removes what groups know of the message that had this id.
local function clear_groups(slot)
  for _, group in ipairs(groups) do
    if slot.due then forget_failures(group, {slot.id}) else take_out(group, slot.id) end
  end
end

local later, moved, events, created, throttled, earliest = {}, {}, {}, {}, {}, nil

-- Notes the burst's first send, and the key's instant.
local function note(slot, is_new, first, at)
  if first then
    call('HSET', KEYED, slot.id, int(first))
  elseif is_new and slot.stage ~= 'free' then
    call('HDEL', KEYED, slot.id)
  end
  if at then throttled[#throttled + 1], throttled[#throttled + 2] = int(at), (split_id(slot.id)) end
end

-- Writes one message; returns its outcome.
local function write(i, slot)
  local id, is_new, envelope = slot.id, slot.stage ~= 'unstarted', ARGV[ENVELOPES + i]
  local before = not is_new and (slot.due or next_due(id) or now) or nil
  local due, first, at = due_by(ARGV[RULES + i], slot, before)
  local stays = before and not slot.due and (due == before or math.max(due, before) <= now)
  local letter = 'r'
  if slot.stage == 'free' then letter = 'a' elseif slot.stage == 'in_flight' then letter = 'f' end
  if stays or before and string.byte(ARGV[RULES + i]) ~= 100 then letter, due = 'b', before end
  slot.mark = slot.mark or letter == 'a' and '-' or letter
  call('SET', slot.body, string.sub(envelope, 1, 9) .. slot.mark .. string.sub(envelope, 11))
  if slot.stage == 'free' then
    call('DEL', slot.done)
    created[#created + 1] = id
  else
    if not stays then clear_groups(slot) end
    call('HDEL', POLICY, id)
    call('ZREM', EXPIRY, id)
  end
  note(slot, is_new, first, at)
  if ttls[i] then call('ZADD', EXPIRY, int(due + tonumber(ttls[i])), id) end
  if policies[i] then put_policy(id, policies[i]) end
  if not stays then
    later[#later + 1], later[#later + 2] = int(due), id
    moved[#moved + 1] = id
    earliest = math.min(earliest or due, due)
    slot.due = due
  end
  slot.stage = 'unstarted'
  local expires = ttls[i] and due + tonumber(ttls[i])
  local state = letter == 'a' and 'sent' or 'replaced'
  events[#events + 1] = sending(id, state, due, envelope, expires, policies[i])
  return letter
end

local letters, numbers, waiting_head = {}, {}, head(WAITING)
for i = 1, n do
  local slot = slots[i]
  letters[i] = slot and (slot.answer or write(i, slot)) or 'u'
  numbers[i] = slot and string.sub(slot.id, -1) or '0'
end
local reply = {'OK', table.concat(letters), table.concat(numbers)}
if #events == 0 then return reply end

if #later > 0 then call('ZADD', WAITING, unpack(later)) end
list_by_key(created, true)
if has_lanes() then number_sends(moved) else call('HSET', OPTIONS, 'lanes', 1) end
if #throttled > 0 then
  local past = call('ZRANGEBYSCORE', THROTTLED, '-inf', int(now), 'LIMIT', 0, #throttled)
  if #past > 0 then call('ZREM', THROTTLED, unpack(past)) end
  call('ZADD', THROTTLED, unpack(throttled))
  local last = call('ZRANGE', THROTTLED, -1, -1, 'WITHSCORES')
  call('PEXPIRE', THROTTLED, int(tonumber(last[2]) - now + 1000))
end
count('sent', #events)
if settings[3] == '1' then journal(events) end
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
return remember(reply)
