-- configure: writes a topic's options.
-- Guarantee: 'declare' (a manager's YAML) changes only what a declaration last wrote, so that what
-- an operator set lasts; `paused` is never declared. Whoever resumes a topic wakes the managers.
-- KEYS  the prelude's
-- ARGV  'declare' or 'set'; n; n times option, 1 to write it or 0 to take it away, value
-- Returns {'OK', options changed}
local declared = ARGV[ARGS + 1] == 'declare'
local n, first = tonumber(ARGV[ARGS + 2]), ARGS + 2
local changes = 0

local function write(name, value)
  if value then call('HSET', OPTIONS, name, value) else call('HDEL', OPTIONS, name) end
end

begin_freeing()
for i = 1, n do
  local name, value = ARGV[first + 3 * i - 2], ARGV[first + 3 * i]
  if ARGV[first + 3 * i - 1] == '0' then value = false end
  local is, was = call('HGET', OPTIONS, name), call('HGET', OPTIONS, 'declared:' .. name)
  local written = not declared or name ~= 'paused' and (not is or is == was)
  if declared and name ~= 'paused' then write('declared:' .. name, value) end
  if written then
    write(name, value)
    if is ~= value then changes = changes + 1 end
  end
  if written and name == 'paused' then wake() end
end
return {'OK', changes}
