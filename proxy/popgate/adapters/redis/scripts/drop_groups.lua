-- Request: the subscription.
each_group(request[1], false, function(_, _, group) redis.call('UNLINK', members_key(group), places_key(group)) end)
redis.call('UNLINK', groups_key(request[1]), streams_key(request[1]))
redis.call('SREM', prefix .. 'group_homes', request[1])
return cmsgpack.pack(true)
