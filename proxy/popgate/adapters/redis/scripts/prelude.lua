-- The beginning of every script. ARGV: the prefix of all keys, the incarnation that the caller knows, its request. Keys
-- are made here and not declared: popgate runs on one Redis, not on a Redis Cluster.
local prefix = ARGV[1]
local stands = redis.call('MGET', prefix .. 'incarnation', prefix .. 'limits')
if stands[1] ~= ARGV[2] then
  return redis.error_reply('POPGATE_ANEW this is not the data that the caller knows')
end
local request = cmsgpack.unpack(ARGV[3])

-- The store's time in whole microseconds, because Lua's numbers hold those exactly, but not sums of fractional seconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local has_limits = stands[2] -- set if any subscription has a max_in_flight; see counting.lua

local CHUNK = 1000 -- arguments of one command; Lua's stack holds some thousands

-- Call "command key item item ..." in chunks. Pairs stay together, because CHUNK is even.
local function call_all(command, key, items)
  for first = 1, #items, CHUNK do
    redis.call(command, key, unpack(items, first, math.min(first + CHUNK - 1, #items)))
  end
end

-- One MessagePack array of the values and the records, which are MessagePack already and are not packed twice.
local function reply(records, ...)
  local values = select('#', ...)
  return string.char(145 + values) .. cmsgpack.pack(...) .. '\221' .. struct.pack('>I4', #records)
    .. table.concat(records)
end
