-- Request: the queue. Its claim stays: epochs only grow.
if counted_for(request[1]) then uncount(request[1], redis.call('HKEYS', live_key(request[1]))) end
redis.call('UNLINK', live_key(request[1]), settled_key(request[1]), order_key(request[1]))
return cmsgpack.pack(true)
