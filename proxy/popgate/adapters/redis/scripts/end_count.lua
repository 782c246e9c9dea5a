-- All older leases are counted. Request: the subscription, its queues. Returns whether these are still its queues.
local name, queues = request[1], request[2]
for i = 1, #queues do
  if redis.call('HGET', prefix .. 'limited', queues[i]) ~= name then return cmsgpack.pack(false) end
end
redis.call('HDEL', prefix .. 'counting', name)
redis.call('HSET', prefix .. 'counted', name, #queues)
return cmsgpack.pack(true)
