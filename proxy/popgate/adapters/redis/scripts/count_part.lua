-- Count the leases among the next records of a queue. Request: the subscription, the queue, the cursor, the size of a
-- part. Returns the next cursor.
local name, queue = request[1], request[2]
local part = redis.call('HSCAN', live_key(queue), request[3], 'COUNT', request[4])
local leased = {}
for i = 1, #part[2], 2 do
  local raw = part[2][i + 1]
  local visible_at = state_of(raw) == LEASED and unpack_record(raw).visible_at
  if visible_at and visible_at > now then
    leased[#leased + 1] = visible_at
    leased[#leased + 1] = out_member(queue, part[2][i])
  end
end
call_all('ZADD', out_key(name), leased)
return cmsgpack.pack(part[1])
