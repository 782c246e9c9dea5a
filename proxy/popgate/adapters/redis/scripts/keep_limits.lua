-- Stop counting for all subscriptions but these. Request: the subscriptions.
local kept = {}
for i = 1, #request[1] do kept[request[1][i]] = true end
local limited = redis.call('HGETALL', prefix .. 'limited')
for at = 1, #limited, 2 do
  local name = limited[at + 1]
  if not kept[name] then
    redis.call('HDEL', prefix .. 'limited', limited[at])
    redis.call('HDEL', prefix .. 'counted', name)
    redis.call('HDEL', prefix .. 'counting', name)
    redis.call('UNLINK', out_key(name), refused_key(name))
  end
end
if redis.call('EXISTS', prefix .. 'limited') == 0 then redis.call('DEL', prefix .. 'limits') end
return cmsgpack.pack(true)
