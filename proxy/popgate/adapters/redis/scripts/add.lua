-- Request: the name of a hash, a field, a value. Sets the field if it is missing, and returns its value.
redis.call('HSETNX', prefix .. request[1], request[2], request[3])
return cmsgpack.pack(redis.call('HGET', prefix .. request[1], request[2]))
