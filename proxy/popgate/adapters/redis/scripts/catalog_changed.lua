-- Raise the catalog's version, by the clock as well as by count, so that a version that was lost with the data is not
-- used again. Written last: when its memory is full, Redis refuses a script whose first write may need more, and then
-- nothing could be deleted.
local time, version = redis.call('TIME'), prefix .. 'catalog'
local count = math.max(tonumber(redis.call('GET', version) or 0) + 1, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', version, string.format('%.0f', count))
redis.call('PUBLISH', prefix .. 'catalog_changes', '')
