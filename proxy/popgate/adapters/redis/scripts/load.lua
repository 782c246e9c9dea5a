-- The next part of a queue's live records. Request: the queue, the cursor, the size of a part.
local part = redis.call('HSCAN', live_key(request[1]), request[2], 'COUNT', request[3])
local copies, places = {}, {}
for i = 1, #part[2], 2 do
  copies[#copies + 1] = part[2][i]
  places[#places + 1] = place_of(part[2][i + 1])
end
return reply(reply_records, now, part[1], copies, places)
