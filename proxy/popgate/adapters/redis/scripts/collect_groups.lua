-- Release abandoned groups, and forget streams without groups that have not changed. Request: the subscription, the age
-- limit of groups that are being formed, and that of all other groups and streams.
local of, formed_before, ended_before = request[1], now - request[2], now - request[3]
local used = {}
each_group(of, false, function(stream, epoch, group)
  used[stream] = true
  local is_left = group.ends_at < ended_before
  if group.state == FORMING then
    is_left = is_left or group.ends_at < formed_before or (group.span == 0 and group.created_at < formed_before)
  end
  if is_left and group.state ~= RELEASING then
    group.state = RELEASING
    write_group({ of, stream, epoch }, group)
  end
end)
local streams = redis.call('HGETALL', streams_key(of))
for i = 1, #streams, 2 do
  if not used[streams[i]] and cmsgpack.unpack(streams[i + 1])[4] < ended_before then
    redis.call('HDEL', streams_key(of), streams[i])
  end
end
if redis.call('EXISTS', streams_key(of)) == 0 then redis.call('SREM', prefix .. 'group_homes', of) end
return cmsgpack.pack(true)
