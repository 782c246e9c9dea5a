-- Request: the key, microseconds, the greatest age. Returns the latest end of the leases.
local group, refused = found_group(request[1])
if refused then return refused end
if group.ends_at <= now then
  group.held_since = now
  write_group(request[1], group)
end
return cmsgpack.pack({ math.min(now + request[2], group.held_since + request[3]) })
