-- Request: the subscription and the attempt id as one field.
local noted = redis.call('HGET', prefix .. 'attempts', request[1])
local queues, copies, places = {}, {}, {}
if noted then
  each_good_lease(cmsgpack.unpack(noted), function(queue, copy, record, raw)
    if record.state == LEASED and record.visible_at > now then
      queues[#queues + 1] = queue
      copies[#copies + 1] = copy
      places[#places + 1] = place_of(raw)
    end
  end)
end
return reply(reply_records, now, queues, copies, places)
