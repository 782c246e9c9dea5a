-- Request: the subscription, the assignment, the version that it replaces. Returns the new version, or 0 if another one
-- is stored.
if stands() ~= request[3] then return cmsgpack.pack(0) end
local version = math.max(request[3] + 1, math.floor(now / 1000)) -- never repeats, even after drop_assignment
redis.call('HSET', assignments, request[1], request[2])
redis.call('HSET', versions, request[1], string.format('%.0f', version))
return cmsgpack.pack(version)
