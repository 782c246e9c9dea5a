-- Count the leases in these queues from now on, as they are written. Request: the subscription, its queues, how many
-- microseconds to wait for owners. Returns whether existing leases may be counted: not before each queue has been
-- claimed, because after a data loss its owner may still have to write back its leases.
local name, queues = request[1], request[2]
local limited = redis.call('HGETALL', prefix .. 'limited')
for at = 1, #limited, 2 do
  if limited[at + 1] == name then redis.call('HDEL', prefix .. 'limited', limited[at]) end
end
for i = 1, #queues do redis.call('HSET', prefix .. 'limited', queues[i], name) end
redis.call('SET', prefix .. 'limits', '1')
redis.call('HSETNX', prefix .. 'counting', name, string.format('%.0f', now))
if now - tonumber(redis.call('HGET', prefix .. 'counting', name)) > request[3] then return cmsgpack.pack(true) end
for i = 1, #queues do
  if tonumber(redis.call('HGET', prefix .. 'claims', queues[i]) or 0) == 0 then return cmsgpack.pack(false) end
end
return cmsgpack.pack(true)
