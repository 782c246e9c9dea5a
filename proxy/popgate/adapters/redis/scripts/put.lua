-- Request: the name of a hash, a field, its value.
redis.call('HSET', prefix .. request[1], request[2], request[3])
