-- Request: the subscription, the mode generation.
if tonumber(redis.call('HGET', prefix .. 'modes', request[1]) or 0) < request[2] then
  redis.call('HSET', prefix .. 'modes', request[1], string.format('%.0f', request[2]))
end
return cmsgpack.pack(true)
