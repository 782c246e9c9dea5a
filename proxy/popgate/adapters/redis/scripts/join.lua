if redis.call('HSET', members, me, request[3]) == 1 then
  changed()
end
beat(request[2])
own(request[4] or {})
return view()
