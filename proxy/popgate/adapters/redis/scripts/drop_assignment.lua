redis.call('HDEL', assignments, request[1])
redis.call('HDEL', versions, request[1])
return cmsgpack.pack(true)
