-- coalesce: new -> waiting, or a new body for the message of the same key that no group has begun with.
-- Guarantee: the messages of these sends share two ids of their key, and one of them is unstarted: it has
-- the body of the last send. A message that has begun stays as it is, and the next send takes the other id.
-- If it then waits again, the one that is due later gets the bodies of further sends. Never early: instants
-- are rounded up. What is due keeps its place if its body changes. A repeated call returns the first answer.
-- A call that exceeds the capacity, or max_per_key, writes nothing.
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

local THROTTLED, BODIES = KEYS[ID_KEYS + 1], ID_KEYS + 2
local token, only_known, n = ARGV[ARGS + 2], ARGV[ARGS + 3] == '1', tonumber(ARGV[ARGS + 4])
local RULES, ENVELOPES = ARGS + 4, ARGS + 4 + n
local _, now, now_up = clock()
local settings = call('HMGET', OPTIONS, 'max_body_bytes', 'capacity', 'journal', 'max_per_key', 'lanes')
lanes_in_use = settings[5] == '1'

-- Values by message number, and the index of the argument after them.
local function numbered(at)
  local values, last = {}, at + 2 * tonumber(ARGV[at])
  for k = at + 1, last, 2 do values[tonumber(ARGV[k])] = ARGV[k + 1] end
  return values, last + 1
end

local ttls, policies_at = numbered(ENVELOPES + n + 1)
local policies = numbered(policies_at)

-- The two ids of each message's key, and the due times of those that wait.
local ids = sized(2 * n)
for k = 1, 2 * n do ids[k] = id_of(KEYS[BODIES + 2 * k - 2]) end
local dues = scores_of(WAITING, ids)

-- The order in which a send takes an id, by the stage of its message, and the outcome. All but the first two
-- take the place of an older message.
local RANKS = {unstarted = 1, free = 2, dead = 3, started = 4, in_flight = 5}
local LETTERS = {free = 'a', dead = 'r', started = 'r', in_flight = 'f'}

-- The stage of the message that has an id, given by its number, and the outcome if an earlier call with
-- this token wrote it.
local function look_at(k)
  local at, answer = BODIES + 2 * k - 2, nil
  local guard = fence(KEYS[at])
  local known = guard == '' and call('GETRANGE', KEYS[at + 1], 0, 8) or guard
  if string.find(known, token, 1, true) == 1 then
    answer = string.match(string.lower(string.sub(known, 9)), '[rfb]') or 'a'
  end
  if guard == '' then return 'free', answer end
  return dues[k] and 'unstarted' or stage_of(ids[k], guard) or 'dead', answer
end

local function due_at(k) return tonumber(dues[k] or due_next(ids[k]) or now) end

-- The id that the sends of a key take; false if the key has no live message here and has to. For an
-- unstarted message: when it is due, whether it waits, and later the first send of its burst.
local function choose(k)
  local stage, answer = look_at(k)
  local other, others = look_at(k + 1)
  if only_known and stage == 'free' and other == 'free' and not (answer or others) then return false end
  local is_second = RANKS[other] < RANKS[stage]
  if stage == 'unstarted' and other == stage then is_second = due_at(k + 1) >= due_at(k) end
  if not answer and (others or is_second) then k, stage, answer = k + 1, other, others end
  local waits = stage == 'unstarted' and dues[k]
  return {
    at = BODIES + 2 * k - 2, number = 2 - k % 2, id = ids[k], stage = stage, answer = answer,
    due = stage == 'unstarted' and due_at(k), waits = waits, waited = waits,
  }
end

-- The id of each message, by its number; messages of one key share it. The ids that are written.
local slots, by_key, new, most_per_key = {}, {}, 0, not only_known and tonumber(settings[4] or '')
local taken, chosen, limit = {}, {}, tonumber(settings[1] or DEFAULT.max_body_bytes)
for i = 1, n do
  local id, size = ids[2 * i - 1], #ARGV[ENVELOPES + i] - 15
  if size > limit then size = size - (tonumber(string.sub(ARGV[ENVELOPES + i], 12, 15), 16) or 0) end
  if size > limit then return {'LARGE', i, size, limit} end
  if by_key[id] == nil then
    local slot = choose(2 * i - 1)
    local stage = slot and not slot.answer and slot.stage
    by_key[id] = slot
    if stage then taken[#taken + 1], chosen[#chosen + 1] = slot, slot.id end
    if stage == 'free' or stage == 'dead' then new = new + 1 end
    if stage == 'free' and most_per_key then
      local key = split_id(id)
      local live = count_of_key(key)
      if live >= most_per_key then return {'KEYFULL', key, live, most_per_key} end
    end
  end
  slots[i] = by_key[id]
end

local capacity = tonumber(settings[2] or '') -- empty: unlimited
if capacity and new > 0 and not only_known then
  local live = count_live()
  if live + new > capacity then return {'FULL', live, capacity} end
end

for k, first in ipairs(#taken > 0 and call('HMGET', KEYED, unpack(chosen)) or {}) do
  taken[k].first = taken[k].stage == 'unstarted' and tonumber(first or '')
end

-- A rule: 'd5000,60000' is 5 s after this send, but at most a minute after the burst's first (the latter may
-- be missing); 't5000' is now, but 5 s after the key's last message; 'l+5000' is as for enqueue.
local rules = {}
local function rule_of(text)
  if not rules[text] then
    local kind, span, most = string.match(text, '^(%a)([^,]*),?(%d*)$')
    rules[text] = {kind = kind, at = kind == 'l' and due_from(span), span = tonumber(span), most = tonumber(most)}
  end
  return rules[text]
end

-- The due time of a key's new throttled message. The instant before which the next one is not due follows
-- it by the interval. One beyond the interval is that of a longer one, of a message that never ran, or of a
-- clock that was set back since.
local throttled = {}
local function throttle(key, interval)
  local at = math.min(tonumber(call('ZSCORE', THROTTLED, key) or now), now_up + interval)
  throttled[#throttled + 1], throttled[#throttled + 2] = int((at > now and at or now_up) + interval), key
  return math.max(at, now)
end

local journaled, events, written = settings[3] == '1', {}, 0

-- Notes what a message changes: of a call's messages with the same id, the last is written. Gives its outcome.
local function take(i, slot)
  local rule, due, letter = rule_of(ARGV[RULES + i]), slot.due, nil
  if rule.kind == 'd' then
    due = now_up + rule.span
    if not slot.first then slot.first, slot.begins = now_up, true end
    if rule.most then due = math.min(due, slot.first + rule.most) end
    -- What is due keeps its place.
    local stays = slot.due and not slot.waits and (due == slot.due or math.max(due, slot.due) <= now)
    if stays then due, letter = slot.due, 'b' end
  elseif due then
    letter = 'b'
  else
    due = rule.at or throttle(split_id(slot.id), rule.span)
  end
  letter = letter or slot.due and 'r' or LETTERS[slot.stage]
  slot.last, slot.due, slot.waits = i, due, slot.waits or letter ~= 'b'
  slot.mark = slot.mark or letter == 'a' and '-' or letter
  slot.ends = ttls[i] and due + tonumber(ttls[i])
  if journaled then
    local state = letter == 'a' and 'sent' or 'replaced'
    events[#events + 1] = sending(slot.id, state, due, ARGV[ENVELOPES + i], slot.ends, policies[i])
  end
  written = written + 1
  return letter
end

local letters, numbers, waiting_head = {}, {}, head(WAITING)
for i, slot in ipairs(slots) do
  letters[i] = slot and (slot.answer or take(i, slot)) or 'u'
  numbers[i] = slot and slot.number or 0
end
local reply = {'OK', table.concat(letters), table.concat(numbers)}
if written == 0 then return reply end

local bodies, created, replaced, waited = sized(2 * #taken), {}, {}, {}
for k, slot in ipairs(taken) do
  local envelope = ARGV[ENVELOPES + slot.last]
  bodies[2 * k - 1] = KEYS[slot.at]
  bodies[2 * k] = string.sub(envelope, 1, 9) .. slot.mark .. string.sub(envelope, 11)
  local list = slot.stage == 'free' and created or replaced
  list[#list + 1] = slot.id
  if slot.waited then waited[#waited + 1] = slot.id end
end
call('MSET', unpack(bodies)) -- at maxmemory the server refuses this first write, and so the call
for _, group in ipairs(#waited > 0 and groups or {}) do forget_failures(group, waited) end
if #replaced > 0 and call('EXISTS', POLICY, EXPIRY) > 0 then forget_policies(replaced) end

local later, moved = {}, {}
for _, slot in ipairs(taken) do
  local id = slot.id
  if slot.stage == 'free' then
    call('DEL', KEYS[slot.at + 1])
  elseif slot.waits and not slot.waited then
    for _, group in ipairs(groups) do take_out(group, id) end
  end
  if slot.begins then
    call('HSET', KEYED, id, int(slot.first))
  elseif RANKS[slot.stage] > 2 then
    call('HDEL', KEYED, id)
  end
  if slot.waits then later[#later + 1], later[#later + 2], moved[#moved + 1] = slot.due, id, id end
  if slot.ends then call('ZADD', EXPIRY, int(slot.ends), id) end
  if policies[slot.last] then put_policy(id, policies[slot.last]) end
end
if #later > 0 then call('ZADD', WAITING, unpack(later)) end
list_by_key(created, true)
if lanes_in_use then number_sends(moved) else call('HSET', OPTIONS, 'lanes', 1) end
if #throttled > 0 then
  local past = call('ZRANGEBYSCORE', THROTTLED, '-inf', int(now), 'LIMIT', 0, #throttled)
  if #past > 0 then call('ZREM', THROTTLED, unpack(past)) end
  call('ZADD', THROTTLED, unpack(throttled))
  local last = call('ZRANGE', THROTTLED, -1, -1, 'WITHSCORES')
  call('PEXPIRE', THROTTLED, int(tonumber(last[2]) - now + 1000))
end
count('sent', written)
journal(events)
if #later > 0 and (not waiting_head or head(WAITING) < waiting_head) then wake() end
return remember(reply)
