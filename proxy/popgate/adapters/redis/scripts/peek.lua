-- Request: the queue, the copies.
local found, places = read_batch({ request[1] }, false, request[2]), {}
for i = 1, #request[2] do places[i] = place_of(found[i]) end
return reply(reply_records, now, places)
