-- Drop old ids and notes: one step. Request: the windows of ids and of notes, how many to look at. Returns how many ids
-- were dropped, and whether to go on.
local bite = request[3]
local noted = prefix .. 'repeated'
local old = redis.call('ZRANGEBYSCORE', noted, '-inf', now - request[2], 'LIMIT', 0, bite)
call_all('ZREM', noted, old)

local order, seen, gone = redis.call('LRANGE', prefix .. 'dedup_order', 0, bite - 1), 0, 0
for i = 1, #order do
  local at, topic, id = unpack(cmsgpack.unpack(order[i]))
  if at > now - request[1] then break end
  local known = redis.call('HGET', ids_key(topic), id)
  if known and cmsgpack.unpack(known)[4] == at then -- otherwise it was reserved again, further back in the list
    redis.call('HDEL', ids_key(topic), id)
    gone = gone + 1
  end
  seen = i
end
if seen > 0 then redis.call('LTRIM', prefix .. 'dedup_order', seen, -1) end
return cmsgpack.pack({ gone, #old == bite or seen == bite })
