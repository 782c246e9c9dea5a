local released = 0
for _, queue in ipairs(request[2]) do
  if redis.call('HGET', owners, queue) == me then
    released = released + redis.call('HDEL', owners, queue)
  end
end
if released > 0 then
  changed()
end
return cmsgpack.pack(current())
