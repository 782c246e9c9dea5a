-- Request: the name of a hash, a field. Returns its value, or nil.
return cmsgpack.pack(redis.call('HGET', prefix .. request[1], request[2]) or nil)
