-- The catalog's version, by the clock as well as by count: one that was lost with the data is not given again. Written
-- last: a Redis whose memory is full refuses a script's first write that may take more, and then nothing can be deleted.
local time, version = redis.call('TIME'), prefix .. 'catalog'
local count = math.max(tonumber(redis.call('GET', version) or 0) + 1, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', version, string.format('%.0f', count))
redis.call('PUBLISH', prefix .. 'catalog_changes', '')
