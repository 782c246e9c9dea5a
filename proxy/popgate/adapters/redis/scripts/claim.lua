-- Request: the queue.
local queue = request[1]
local epoch = new_epoch(queue, 0)
local transient, names = {}, redis.call('HKEYS', live_key(queue))
for i = 1, #names do
  if names[i]:byte(1) == 126 then transient[#transient + 1] = names[i] end -- ~
end
call_all('HDEL', live_key(queue), transient)
uncount(queue, transient)
return cmsgpack.pack(epoch)
