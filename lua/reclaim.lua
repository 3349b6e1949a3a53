-- reclaim: in flight for longer than the ack timeout -> retry or garbage.
-- Guarantee: an entry without a message is cleared and never stops the others; a lease of its own
-- is kept to; each call looks at one window, and the caller goes on from the cursor to the end.
-- KEYS  the prelude's
-- ARGV  own group's number; a random seed for jitter; first id of the window ('-', or '(' and the
--       last one seen); last id of the range; the window's size
-- Returns {'OK', cursor or '' at the end, ms until the next lease of this window ends or -1,
--       entries cleared, id, outcome ('r<due>' or 'g'), failed attempts, ...}; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
math.randomseed(tonumber(ARGV[ARGS + 2]))
local from, to = ARGV[ARGS + 3], ARGV[ARGS + 4]
local most = math.min(tonumber(ARGV[ARGS + 5]), 500)
local timeout = option('ack_timeout')
local _, now = clock()
local retry_head = head(group.retry)
local reply, cleared, next_end, earliest = {}, 0, -1, nil

local function reclaim_one(id, entry)
  local outcome, due, failed = fail(group, id, entry, nil, 'ack timeout', now)
  if due then earliest = math.min(earliest or due, due) end
  reply[#reply + 1] = id
  reply[#reply + 1] = due and outcome .. int(due) or outcome
  reply[#reply + 1] = failed
end

local function clear(entry)
  drop_entries(group, {}, {entry})
  cleared = cleared + 1
end

local function ends_in(ms)
  if next_end < 0 or ms < next_end then next_end = math.max(ms, 0) end
end

begin_freeing()
if from == '-' then
  local over = call('ZRANGEBYSCORE', group.leases, '-inf', int(now), 'LIMIT', 0, most)
  for _, id in ipairs(over) do
    local entry = call('HGET', group.entries, id)
    if entry and pending(group, entry) then
      reclaim_one(id, entry)
    else
      call('ZREM', group.leases, id)
    end
  end
  if #over == most then ends_in(0) end
  local lease_head = head(group.leases)
  if lease_head then ends_in(lease_head - now) end
end

local window = call('XPENDING', group.ready, group.name, from, to, most)
local cursor = #window == most and '(' .. window[#window][1] or ''
for _, item in ipairs(window) do
  local entry, left = item[1], timeout - item[3]
  if left > 0 then
    ends_in(left)
  else
    local fields = read_entry(group, entry)
    local id = fields and field(fields, 'id')
    if not id or call('HGET', group.entries, id) ~= entry then
      clear(entry)
    elseif not call('ZSCORE', group.leases, id) then
      reclaim_one(id, entry)
    end
  end
end
count('reclaimed', #reply / 3, group)
count('cleared', cleared, group)
if earliest and (not retry_head or earliest < retry_head) then wake() end
return {'OK', cursor, next_end, cleared, unpack(reply)}
