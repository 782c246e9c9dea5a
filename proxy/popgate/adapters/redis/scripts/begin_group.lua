-- Request: the key, the lease id, the builder, the slices, the maximum number of groups of a subscription.
local key = request[1]
local group, refused = find_group(key)
if refused then return refused end
if not group then
  if redis.call('HLEN', groups_key(key[1])) >= request[5] then return refusal('full') end
  if not read_stream(key[1], key[2]) then write_stream(key[1], key[2], { string.rep('0', #key[3]), 0, 0, now }) end
  group = {
    id = redis.call('INCR', prefix .. 'group_id'), state = FORMING, lease_id = request[2], builder = request[3],
    slices = request[4], span = 0, count = 0, lost = 0, ends_at = NOT_LEASED, created_at = now, held_since = now,
    first = 0,
  }
  write_group(key, group)
elseif group.state == FORMING then
  group.builder, group.slices = request[3], request[4]
  write_group(key, group)
end
return cmsgpack.pack(stored(group))
