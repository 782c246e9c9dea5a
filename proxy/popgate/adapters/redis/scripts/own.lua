if not is_member() then
  return cmsgpack.pack('no member')
end
local mine, taken = {}, 0
for _, queue in ipairs(request[2]) do
  taken = taken + redis.call('HSETNX', owners, queue, me)
  if redis.call('HGET', owners, queue) == me then
    mine[#mine + 1] = queue
  end
end
if taken > 0 then
  changed()
end
return cmsgpack.pack({mine, current()})
