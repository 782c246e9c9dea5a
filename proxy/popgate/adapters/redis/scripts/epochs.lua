-- By the clock as well as by count, so that an epoch that Redis lost in a crash is not used again. above: the highest
-- epoch that the caller knows.
local function new_epoch(queue, above)
  local time = redis.call('TIME')
  local epoch = math.max(tonumber(redis.call('HGET', prefix .. 'claims', queue) or 0) + 1, above + 1,
    time[1] * 1000 + math.floor(time[2] / 1000))
  redis.call('HSET', prefix .. 'claims', queue, string.format('%.0f', epoch))
  return epoch
end
