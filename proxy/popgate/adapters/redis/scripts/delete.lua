-- Request: the name of a hash, a field.
redis.call('HDEL', prefix .. request[1], request[2])
