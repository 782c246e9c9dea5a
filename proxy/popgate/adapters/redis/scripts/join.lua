if redis.call('HSET', members, me, request[3]) == 1 then
  changed()
end
beat(request[2])
return view()
