-- Request: the topic. What is left of its ids in the list is dropped when its time comes.
redis.call('UNLINK', ids_key(request[1]))
return cmsgpack.pack(true)
