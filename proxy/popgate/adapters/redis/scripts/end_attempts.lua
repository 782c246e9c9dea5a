-- Forget attempts that will never find a lease again. An attempt does not learn of extensions, and an expired lease can
-- be extended until another client gets the message. So no attempt is deleted before all its leases are settled, given
-- back or granted to others. Request: how many to look at, microseconds until kept ones are looked at again.
local ends = prefix .. 'attempt_ends'
local due = redis.call('ZRANGEBYSCORE', ends, '-inf', '(' .. string.format('%.0f', now), 'LIMIT', 0, request[1])
for i = 1, #due do
  local field, look_again = due[i], false
  local noted = redis.call('HGET', prefix .. 'attempts', field)
  if noted then
    each_good_lease(cmsgpack.unpack(noted), function(_, _, record)
      look_again = math.max(look_again or now + request[2], record.visible_at)
    end)
  end
  if look_again then
    redis.call('ZADD', ends, look_again, field)
  else
    redis.call('HDEL', prefix .. 'attempts', field)
    redis.call('ZREM', ends, field)
  end
end
return cmsgpack.pack(#due)
