-- Request: the name of a hash. Returns its fields and values, one after the other.
return cmsgpack.pack(redis.call('HGETALL', prefix .. request[1]))
