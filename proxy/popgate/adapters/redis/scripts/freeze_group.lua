-- Request: the key, the builder. Returns the time without a group if the group has no members and was deleted.
local group, refused = formed_group(request[1], request[2])
if refused then return refused end
if group.count == 0 then
  delete_group(request[1], group)
  return cmsgpack.pack({ now })
end
group.state = FROZEN
redis.call('UNLINK', places_key(group))
write_group(request[1], group)
return cmsgpack.pack(stored(group))
