-- Request: the topic. Entries of its ids that are left in the list are dropped when they end.
redis.call('UNLINK', ids_key(request[1]))
return cmsgpack.pack(true)
