-- Request: the assignment, the version that it replaces. Returns the new one, or 0 where another one stands.
if stands() ~= request[3] then return cmsgpack.pack(0) end
local version = math.max(request[3] + 1, math.floor(now / 1000)) -- none comes again, also after it was dropped
redis.call('HSET', assignments, request[1], request[2])
redis.call('HSET', versions, request[1], string.format('%.0f', version))
return cmsgpack.pack(version)
