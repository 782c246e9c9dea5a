-- Request: the subscription, the mode generation. Returns the one that is needed now.
local needed = tonumber(redis.call('HGET', prefix .. 'modes', request[1]) or 0)
if needed < request[2] then
  needed = request[2]
  redis.call('HSET', prefix .. 'modes', request[1], string.format('%.0f', needed))
end
return cmsgpack.pack(needed)
