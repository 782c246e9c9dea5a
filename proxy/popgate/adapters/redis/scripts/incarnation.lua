-- The name of this data, made at first use: a caller that finds another name than it knew has detected a data loss. In
-- the same step it writes back the values that it remembers and no other process has, so that no caller sees the new
-- data without them. ARGV: the prefix of all keys, a new name, {keys by name, hashes by name}.
local prefix = ARGV[1]
local remembered = cmsgpack.unpack(ARGV[3])
redis.call('SETNX', prefix .. 'incarnation', ARGV[2])
for name, value in pairs(remembered[1]) do redis.call('SETNX', prefix .. name, value) end
local put_back = 0
for name, fields in pairs(remembered[2]) do
  for field, value in pairs(fields) do put_back = put_back + redis.call('HSETNX', prefix .. name, field, value) end
end
local name = redis.call('GET', prefix .. 'incarnation')
if put_back == 0 then return name end
