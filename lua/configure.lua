-- configure: writes a topic's options.
-- Guarantee: 'declare' (a manager's YAML) changes only options that a declaration wrote last, so an
-- operator's changes persist; `paused` is never declared. Resuming a topic wakes the managers;
-- the counters `pauses` and `resumes` tell when a topic was paused.
-- A value other than the default of an option of lanes, of the topic or of one group, makes the topic
-- use lanes from then on; a change of one tells the managers to look at the lanes that wait.
-- A change of `shards` writes a new layout in the same step; core.store.reshard then updates the
-- shards. A repeated call returns the first answer.
-- KEYS  the prelude's, the call's record among them
-- ARGV  'declare' or 'set'; n; n times option, 1 to write it or 0 to remove it, value
-- Returns {'OK', options changed}
local before = answered()
if before then return before end

local declared = ARGV[ARGS + 1] == 'declare'
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local changes, uses_lanes, lanes_changed = 0, false, false

local function write(name, value)
  if value then call('HSET', OPTIONS, name, value) else call('HDEL', OPTIONS, name) end
end

local function split_anew(wanted)
  local number, count, older, gone = read_layout()
  if not number then number, count, older, gone = '0', '1', '', '' end
  if count == wanted then return end
  local draining = without(count .. ',' .. older, wanted)
  local left = without(gone, wanted)
  write_layout(int(number + 1), wanted, draining, left)
  call('HDEL', OPTIONS, 'emptied:' .. wanted, 'emptied:' .. count, 'removed:' .. wanted)
end

allow_writes_at_maxmemory()
for i = 1, n do
  local name, value = ARGV[first + 3 * i - 2], ARGV[first + 3 * i]
  if ARGV[first + 3 * i - 1] == '0' then value = false end
  local is, was = call('HGET', OPTIONS, name), call('HGET', OPTIONS, 'declared:' .. name)
  local written = not declared or name ~= 'paused' and (not is or is == was)
  if declared and name ~= 'paused' then write('declared:' .. name, value) end
  if written then
    write(name, value)
    if is ~= value then changes = changes + 1 end
    local default = LANE_OPTIONS[string.match(name, '^[^@]*')]
    if default then
      uses_lanes = uses_lanes or value and value ~= default
      if value and value ~= default and string.find(name, '^order') then call('HSET', OPTIONS, 'ordered', 1) end
      lanes_changed = lanes_changed or is ~= value
    end
  end
  if written and name == 'paused' then
    local switched = (is or '0') ~= (value or '0') and 1 or 0
    if value == '1' then
      count('pauses', switched)
    else
      count('resumes', switched)
    end
    wake()
  end
  if written and name == 'shards' then split_anew(value or '1') end
end
if uses_lanes then call('HSET', OPTIONS, 'lanes', 1) end
if lanes_changed then
  call('HINCRBY', OPTIONS, 'lanes_changed', 1)
  wake()
end
local reply = {'OK', changes}
return changes > 0 and remember(reply) or reply
