-- Request: the queue, the copies.
call_all('HDEL', live_key(request[1]), request[2])
call_all('HDEL', settled_key(request[1]), request[2])
uncount(request[1], request[2])
return cmsgpack.pack(true)
