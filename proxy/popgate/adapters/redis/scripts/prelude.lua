-- The beginning of every script. A script is this file, the files that its own file needs, its own file, and the call
-- of one function there with the arguments that the caller has packed.
--
-- ARGV: the prefix of all keys; the incarnation that the caller knows, '' if it asks for it; the packed arguments.
-- Keys: no script declares its keys, because popgate runs on one Redis and not on a Redis Cluster. Each file lists the
--       keys of its concern without the prefix.
--   incarnation  the name of this data (catalog.lua)
--   limits       exists if any subscription has a max_in_flight (limits.lua)
local prefix = ARGV[1]
local present, has_limits = unpack(redis.call('MGET', prefix .. 'incarnation', prefix .. 'limits'))
if ARGV[2] ~= '' and present ~= ARGV[2] then
  return redis.error_reply('POPGATE_ANEW this is not the data that the caller knows')
end

-- The store's time in whole microseconds, because Lua's numbers hold those exactly, but not sums of fractional seconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local FOREVER = 4503599627370496 -- 2^52 microseconds: 142 years

-- The key of a kind of data, or of one name's: key_of('live', queue) is <prefix>live:<queue>.
local function key_of(kind, name)
  if name then return prefix .. kind .. ':' .. name end
  return prefix .. kind
end

-- A number as Redis stores it: all its digits.
local function digits(number) return string.format('%.0f', number) end

-- The version after the last one. It follows the clock as well as the count, so that a version that Redis has lost with
-- its data is not used again.
local function next_version(last) return math.max(last + 1, math.floor(now / 1000)) end

local CHUNK = 1000 -- arguments of one command; Lua's stack holds some thousands

-- Call "command key item item ..." in chunks. Pairs stay together, because CHUNK is even.
local function call_all(command, key, items)
  for first = 1, #items, CHUNK do
    redis.call(command, key, unpack(items, first, math.min(first + CHUNK - 1, #items)))
  end
end

-- The values of a hash's fields, in order; false for a missing field.
local function read_fields(key, fields)
  if #fields == 0 then return {} end
  if #fields <= CHUNK then return redis.call('HMGET', key, unpack(fields)) end
  local found = {}
  for first = 1, #fields, CHUNK do
    local values = redis.call('HMGET', key, unpack(fields, first, math.min(first + CHUNK - 1, #fields)))
    for i = 1, #values do found[first + i - 1] = values[i] end
  end
  return found
end
