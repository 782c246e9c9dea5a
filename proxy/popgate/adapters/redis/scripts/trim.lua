-- Drop the oldest settled records of a queue: one step. Request: the queue, the time before which they changed, their
-- minimum age, about how many to look at. Returns how many were dropped, how many elements of the list were looked at,
-- whether the next one is too young, and the length of the list.
local queue, before = request[1], math.min(request[2], now - request[3])
local order = order_key(queue)
local length = redis.call('LLEN', order)
local gone, kept, seen, ends = {}, {}, 0, false
local repeated = redis.call('EXISTS', prefix .. 'repeated') == 1

-- Look at copies that were settled together; false if they are too young.
local function look_at(copies)
  local found = {}
  read_fields(settled_key(queue), copies, nil, found)
  for i = 1, #copies do
    local raw = found[i]
    -- A missing record was dropped in another way; only its entry in the list is left.
    if raw then
      if unpack_record(raw).changed_at >= before then return false end
      if repeated and redis.call('ZSCORE', prefix .. 'repeated', copies[i]) then
        kept[#kept + 1] = copies[i] -- may arrive a second time (ports.dedup); moves to the end of the list
      else
        gone[#gone + 1] = copies[i]
      end
    end
  end
  return true
end

while not ends and seen < math.min(length, request[4]) and #gone + #kept < request[4] do
  ends = not look_at(cmsgpack.unpack(redis.call('LRANGE', order, seen, seen)[1]))
  if not ends then seen = seen + 1 end
end
call_all('HDEL', settled_key(queue), gone)
if seen > 0 then redis.call('LTRIM', order, seen, -1) end
if #kept > 0 then note_order(queue, kept) end
return cmsgpack.pack({ #gone, seen, ends, length })
