-- Request: the queue. Its claim stays: epochs only grow.
redis.call('UNLINK', live_key(request[1]), settled_key(request[1]), order_key(request[1]))
return cmsgpack.pack(true)
