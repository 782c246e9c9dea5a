-- Request: the name of a hash, a field, the value that it gets where it has none. Answers: what it has.
redis.call('HSETNX', prefix .. request[1], request[2], request[3])
return cmsgpack.pack(redis.call('HGET', prefix .. request[1], request[2]))
