-- Request: the key, the positions [first, past), how many to look at. Returns the count, and where to go on.
local group, refused = found_group(request[1])
if refused then return refused end
local first, past = math.max(request[2], group.first), math.min(request[3], group.span)
if group.count == group.span then return cmsgpack.pack({ math.max(0, past - first), false }) end
local stop, count = math.min(first + request[4], past), 0
for from = first, stop - 1, CHUNK do
  local fields = {}
  for at = from, math.min(from + CHUNK, stop) - 1 do fields[#fields + 1] = at end
  for _, member in ipairs(redis.call('HMGET', members_key(group), unpack(fields))) do
    if member then count = count + 1 end
  end
end
return cmsgpack.pack({ count, stop < past and stop })
