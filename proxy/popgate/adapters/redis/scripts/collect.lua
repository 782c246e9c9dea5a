-- Drop records that have not changed since a time, in the next part of a hash. Request: the queue, whether the settled
-- ones, the cursor, the size of a part, the time. Returns the next cursor, how many were dropped, the oldest change of
-- the rest.
local key = request[2] and settled_key(request[1]) or live_key(request[1])
local part = redis.call('HSCAN', key, request[3], 'COUNT', request[4])
local gone, oldest = {}, false
for i = 1, #part[2], 2 do
  local changed_at = unpack_record(part[2][i + 1]).changed_at
  if changed_at < request[5] then
    gone[#gone + 1] = part[2][i]
  else
    oldest = math.min(oldest or changed_at, changed_at)
  end
end
call_all('HDEL', key, gone)
return cmsgpack.pack({ part[1], #gone, oldest })
