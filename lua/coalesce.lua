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
  local envelope = ARGV[ENVELOPES + i]
  local size = #envelope - 15 - (tonumber(string.sub(envelope, 12, 15), 16) or 0)
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

-- One id of a key: its fence if it is live, and `answer` if an earlier call with this token wrote it.
local function read_slot(k)
  local slot = {body = KEYS[k], done = KEYS[k + 1], id = id_of(KEYS[k]), guard = fence(KEYS[k])}
  local known = slot.guard ~= '' and slot.guard or call('GETRANGE', slot.done, 0, 8)
  if string.sub(known, 1, 8) == token then
    local mark = string.lower(string.sub(known, 9, 9))
    slot.answer = string.find(mark, '^[rfb]') and mark or 'a'
  end
  return slot
end

-- The stage of its message, and `due` while that waits.
local function look_at(slot)
  if slot.guard == '' then
    slot.stage = 'free'
  else
    slot.stage, slot.due = stage_of(slot.id, slot.guard)
    slot.stage = slot.stage or 'dead'
  end
  return RANKS[slot.stage]
end

-- The id that the sends of a key take; false if the key has no live message here and has to.
local function choose(first)
  local one, other = read_slot(first), read_slot(first + 2)
  if one.answer or other.answer then return one.answer and one or other end
  if only_known and one.guard == '' and other.guard == '' then return false end
  local rank = look_at(one)
  if rank == 1 then return one end
  return look_at(other) < rank and other or one
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
-- also the instant before which the key's next throttled message is not due.
local rules = {}
local function due_by(text, slot, before)
  local rule = rules[text]
  if not rule then
    local kind, span, most = string.match(text, '^(%a)([^,]*),?(%d*)$')
    rule = {kind = kind, due = kind == 'l' and due_from(span), span = tonumber(span), most = tonumber(most)}
    rules[text] = rule
  end
  if rule.kind == 'd' then
    slot.first = slot.first or before and tonumber(call('HGET', KEYED, slot.id) or '')
    local due = now_up + rule.span
    return rule.most and math.min(due, (slot.first or now_up) + rule.most) or due
  end
  if before then return before end
  if rule.kind == 'l' then return rule.due end
  local at = allowed_at(split_id(slot.id), rule.span)
  if at > now then return at, at + rule.span end
  return now, now_up + rule.span
end

local journaled, has_more = settings[3] == '1', call('EXISTS', POLICY, EXPIRY) > 0
local later, moved, events, created, throttled, written, earliest = {}, {}, {}, {}, {}, 0, nil

-- The groups in which messages have failed, or were deferred: also of some that wait again.
local failing = {}
for _, group in ipairs(groups) do
  if call('EXISTS', group.attempts, group.reasons) > 0 then failing[#failing + 1] = group end
end

-- Removes what is known of the message that has this id so far; of one that `stays`, not its place.
local function forget_earlier(slot, stays)
  if slot.due then
    for _, group in ipairs(failing) do forget_failures(group, {slot.id}) end
  elseif not stays then
    for _, group in ipairs(groups) do take_out(group, slot.id) end
  end
  if has_more then forget_policies({slot.id}) end
end

-- Notes the burst's first send, and the key's instant.
local function note(slot, rule, is_new, at)
  if string.byte(rule) == 100 and not slot.first then
    slot.first = now_up
    call('HSET', KEYED, slot.id, int(now_up))
  elseif is_new and slot.stage ~= 'free' then
    call('HDEL', KEYED, slot.id)
  end
  if at then throttled[#throttled + 1], throttled[#throttled + 2] = int(at), (split_id(slot.id)) end
end

-- Writes a message's ttl and policies, and its event.
local function write_rest(i, id, due, letter)
  local ends = ttls[i] and due + tonumber(ttls[i])
  if ends then call('ZADD', EXPIRY, int(ends), id) end
  if policies[i] then put_policy(id, policies[i]) end
  has_more = has_more or ends or policies[i]
  if journaled then
    local state = letter == 'a' and 'sent' or 'replaced'
    events[#events + 1] = sending(id, state, due, ARGV[ENVELOPES + i], ends, policies[i])
  end
end

-- Writes one message; returns its outcome.
local function write(i, slot)
  local id, rule, is_new = slot.id, ARGV[RULES + i], slot.stage ~= 'unstarted'
  local before = not is_new and (slot.due or due_next(id) or now) or nil
  local due, at = due_by(rule, slot, before)
  local stays = before and not slot.due and (due == before or math.max(due, before) <= now)
  local letter, envelope = 'r', ARGV[ENVELOPES + i]
  if slot.stage == 'free' then letter = 'a' elseif slot.stage == 'in_flight' then letter = 'f' end
  if stays or before and string.byte(rule) ~= 100 then letter, due = 'b', before end
  slot.mark = slot.mark or letter == 'a' and '-' or letter
  call('SET', slot.body, string.sub(envelope, 1, 9) .. slot.mark .. string.sub(envelope, 11))
  if slot.stage == 'free' then
    call('DEL', slot.done)
    created[#created + 1] = id
  else
    forget_earlier(slot, stays)
  end
  note(slot, rule, is_new, at)
  if not stays then
    later[#later + 1], later[#later + 2], moved[#moved + 1], slot.due = due, id, id, due
    earliest = math.min(earliest or due, due)
  end
  write_rest(i, id, due, letter)
  slot.stage, written = 'unstarted', written + 1
  return letter
end

local letters, numbers, waiting_head = {}, {}, head(WAITING)
for i = 1, n do
  local slot = slots[i]
  letters[i] = slot and (slot.answer or write(i, slot)) or 'u'
  numbers[i] = slot and string.sub(slot.id, -1) or '0'
end
local reply = {'OK', table.concat(letters), table.concat(numbers)}
if written == 0 then return reply end

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
count('sent', written)
journal(events)
if earliest and (not waiting_head or earliest < waiting_head) then wake() end
return remember(reply)
