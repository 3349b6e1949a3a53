-- prelude: keys, which connect messages of a topic.

-- A message with a key has the id 'key<US>id', <US> being the unit separator, which no other id contains.
-- KEYED lists the live ids of each key, without it: the field of the key has them all, each followed by
-- <US>. Of more than IDS_PER_PART ids it has a part, field 'key<US>' has 'parts ids', and 'key<US>2' and so
-- on the other parts. Parts are added one by one, as in linear hashing (Litwin 1980), so that no call
-- moves more than a part. A whole id, of a debounced message, is the field of its burst's first send.
local US, IDS_PER_PART = '\31', 64

-- The key and the rest of an id; nil for a message without a key.
local function split_id(id)
  local at = string.find(id, US, 1, true)
  if at then return string.sub(id, 1, at - 1), string.sub(id, at + 1) end
  return nil
end

local function part_field(key, number) return number == 1 and key or key .. US .. number end

-- How many parts were there before the last doubling began.
local function parts_before(many)
  local before = 1
  while 2 * before <= many do before = 2 * before end
  return before
end

local function part_number(id, many)
  local hash, before = 0, parts_before(many)
  for i = math.max(1, #id - 15), #id do hash = (31 * hash + string.byte(id, i)) % 16777216 end
  local number = hash % (2 * before)
  return (number < many and number or number - before) + 1
end

local function count_ids(part)
  local _, n = string.gsub(part, US, '')
  return n
end

-- How many live messages a key has.
local function count_of_key(key)
  local stored = call('HMGET', KEYED, key, key .. US)
  local n = string.match(stored[2] or '', ' (%d+)$')
  return tonumber(n) or count_ids(stored[1] or '')
end

-- Moves the ids that belong to a further part out of part `from`, which had them.
local function split_part(parts, from, many)
  local kept, moved = {}, {}
  for id in string.gmatch(parts[from], '[^\31]+') do
    local list = part_number(id, many + 1) == from and kept or moved
    list[#list + 1] = id .. US
  end
  parts[from], parts[many + 1] = US .. table.concat(kept), US .. table.concat(moved)
end

-- Adds ids to the list of a key, or removes them. `head` is its field 'key<US>', and `first` its first part.
-- Returns its parts that may have changed, by number, and that field as number ''; each after a <US>.
local function change_list(key, ids, adds, head, first)
  local many, n = string.match(head or '', '^(%d+) (%d+)$')
  many, n = tonumber(many or 1), tonumber(n or count_ids(first or ''))
  local parts = {US .. (first or '')}
  local function load(number)
    parts[number] = parts[number] or US .. (call('HGET', KEYED, part_field(key, number)) or '')
    return parts[number]
  end
  for _, id in ipairs(ids) do
    local number = many == 1 and 1 or part_number(id, many)
    local part = load(number)
    local at, to = string.find(part, US .. id .. US, 1, true)
    if adds and not at then
      parts[number], n = part .. id .. US, n + 1
    elseif at and not adds then
      parts[number], n = string.sub(part, 1, at - 1) .. string.sub(part, to), n - 1
    end
    if n > IDS_PER_PART * many then
      local from = many - parts_before(many) + 1
      load(from)
      split_part(parts, from, many)
      many = many + 1
    end
  end
  if many > 1 then parts[''] = US .. (n > 0 and many .. ' ' .. n or '') end
  return parts
end

-- Whether a message is one of the two that the coalescing sends of its key share (see coalesce).
local function is_coalesced(id)
  return string.byte(id, -2) == 126 and string.find(id, '\31~[12]$') ~= nil
end

-- Adds the messages that have a key to the lists of their keys, or removes them.
local function list_by_key(ids, adds)
  local by_key, keys, fields, set, gone = {}, {}, {}, {}, {}
  for _, id in ipairs(ids) do
    if not adds and is_coalesced(id) then gone[#gone + 1] = id end
    local key, own = split_id(id)
    if key and not by_key[key] then
      by_key[key], keys[#keys + 1] = {own}, key
      fields[#fields + 1], fields[#fields + 2] = key .. US, key
    elseif key then
      table.insert(by_key[key], own)
    end
  end
  if #keys == 0 then return end
  local stored = call('HMGET', KEYED, unpack(fields))
  for i, key in ipairs(keys) do
    for number, part in pairs(change_list(key, by_key[key], adds, stored[2 * i - 1], stored[2 * i])) do
      local field = part_field(key, number)
      if part ~= US then
        set[#set + 1], set[#set + 2] = field, string.sub(part, 2)
      else
        gone[#gone + 1] = field
      end
    end
  end
  if #set > 0 then call('HSET', KEYED, unpack(set)) end
  if #gone > 0 then call('HDEL', KEYED, unpack(gone)) end
end

-- Whether a message is in the list of its key; nil if it has no key.
local function is_listed(id)
  local key, rest = split_id(id)
  if not key then return nil end
  local many = string.match(call('HGET', KEYED, key .. US) or '', '^%d+') or 1
  local part = call('HGET', KEYED, part_field(key, part_number(rest, tonumber(many)))) or ''
  return string.find(US .. part, US .. rest .. US, 1, true) ~= nil
end

-- Whether the list of an id's key differs from what the caller read: part `number` as `stored`.
local function has_other_list(id, number, stored)
  local key = split_id(id)
  return (call('HGET', KEYED, part_field(key, tonumber(number))) or '') ~= stored
end
