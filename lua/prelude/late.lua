-- prelude: late policies, which decide about messages at their first promotion.

-- A policy is text such as '600000,skip': the topic's is an option. A message's own policies are one text in
-- POLICY: retry delays, late policy, and what lanes need, separated by semicolons. Options say whether any
-- message has its own late policy.
local function late_part(policies) return string.match(policies, '^[^;]*;([^;]+)') end

local function late_policies()
  local settings = call('HMGET', OPTIONS, 'late', 'own_late')
  if settings[2] then return settings[1], true end
  return settings[1] ~= '' and settings[1], false
end

-- Writes a message's own policies.
local function put_policy(id, policy)
  call('HSET', POLICY, id, policy)
  if late_part(policy) then call('HSET', OPTIONS, 'own_late', 1) end
end

-- What happens to a message that waits since `due`: skip, garbage, collapse, or nil if it is promoted.
-- `own` is its value in POLICY. Collapse concerns occurrences of schedules, whose ids end in '@' and a
-- tick. A message that has failed was promoted before.
local function late_action(id, due, now, topics, own)
  if now - due < MIN_LATE_MS then return nil end
  local policy = own and late_part(own) or topics
  local after, action = string.match(policy or '', '^(%d+),(%a+)$')
  if not after or now - due <= tonumber(after) or action == 'run' then return nil end
  if action == 'collapse' and not string.find(id, '.@%-?%d+$') then return nil end
  for _, group in ipairs(groups) do
    if call('HEXISTS', group.attempts, id) == 1 then return nil end
  end
  return action
end
