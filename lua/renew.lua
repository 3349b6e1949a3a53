-- renew: in flight, with new leases after the server's clock was changed.
-- Guarantee: an entry is renewed once per clock step, however many callers there are: afterwards its
-- delivery time is between the step and now, and such entries are skipped. Deliveries keep their
-- consumer; JUSTID keeps the delivery count.
-- KEYS  the prelude's
-- ARGV  own group's number; first id of the window ('-', or '(' and the last one seen); the window's
--       size (50 at most); the size of the clock step in ms (0: unknown); the earliest ms of the new
--       clock at which the step can have happened (0: unknown)
-- Returns {'OK', cursor or '' at the end, entries renewed}; {'GROUPS', ...}
local changed = changed_groups()
if changed then return changed end

local group = groups[tonumber(ARGV[ARGS + 1])]
local from, most = ARGV[ARGS + 2], math.min(tonumber(ARGV[ARGS + 3]), 50)
local by, since = tonumber(ARGV[ARGS + 4]), tonumber(ARGV[ARGS + 5])
local _, now = clock()
local window = call('XPENDING', group.ready, group.name, from, '+', most)
if #window == 0 then return {'OK', '', 0} end

local ahead = delivered_ahead(group, window)
local stale = {}
for _, item in ipairs(window) do
  if ahead[item[1]] or since > 0 and item[3] > now - since then stale[#stale + 1] = item end
end

-- An own lease keeps its remaining time, which requires the size of the step.
local function shift_own_leases()
  local kept, entries = {}, {}
  for i, item in ipairs(stale) do entries[i] = item[1] end
  for i, fields in ipairs(read_entries(group, entries)) do
    local id = fields and field(fields, 'id')
    local ends = id and call('ZSCORE', group.leases, id)
    if ends and by ~= 0 then call('ZADD', group.leases, int(tonumber(ends) + by), id) end
    if not ends or by ~= 0 then kept[#kept + 1] = stale[i] end
  end
  stale = kept
end

allow_writes_at_maxmemory()
if #stale > 0 and call('EXISTS', group.leases) == 1 then shift_own_leases() end
local held, holders = {}, {}
for _, item in ipairs(stale) do
  local entries = held[item[2]]
  if not entries then
    entries = {}
    held[item[2]], holders[#holders + 1] = entries, item[2]
  end
  entries[#entries + 1] = item[1]
end
for _, holder in ipairs(holders) do
  local entries = held[holder]
  entries[#entries + 1] = 'JUSTID'
  call('XCLAIM', group.ready, group.name, holder, '-1000000000000000', unpack(entries))
end
return {'OK', #window == most and '(' .. window[#window][1] or '', #stale}
