return cmsgpack.pack({ stands(), redis.call('HGET', assignments, request[1]) or '' })
