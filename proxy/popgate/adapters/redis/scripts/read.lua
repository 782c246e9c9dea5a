-- Request: the name of a hash. Returns its fields and values alternately.
return cmsgpack.pack(redis.call('HGETALL', prefix .. request[1]))
