-- Request: the queue. By the clock as well as by count: an epoch that Redis lost in a crash is not given again.
local queue = request[1]
local time = redis.call('TIME')
local epoch = math.max(tonumber(redis.call('HGET', prefix .. 'claims', queue) or 0) + 1,
  time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', prefix .. 'claims', queue, string.format('%.0f', epoch))
local transient, names = {}, redis.call('HKEYS', live_key(queue))
for i = 1, #names do
  if names[i]:byte(1) == 126 then transient[#transient + 1] = names[i] end -- ~
end
call_all('HDEL', live_key(queue), transient)
return cmsgpack.pack(epoch)
