-- Request: how many tokens, the lowest possible one.
local key = prefix .. 'next_token'
local first = math.max(tonumber(redis.call('GET', key) or 1), request[2])
redis.call('SET', key, string.format('%.0f', first + request[1]))
return cmsgpack.pack(first)
