beat(request[2])
-- If every two version ranges overlap, all of them have a version in common, so comparing with one after the other is
-- enough.
local mine = cjson.decode(request[3])[2]
for _, says in ipairs(redis.call('HVALS', members)) do
  local theirs = cjson.decode(says)[2]
  if theirs[1] > mine[2] or mine[1] > theirs[2] then
    return view()
  end
end
if redis.call('HSET', members, me, request[3]) == 1 then
  changed()
end
own(request[4] or {})
return view()
