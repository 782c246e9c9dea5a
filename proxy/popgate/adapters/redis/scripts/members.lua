-- Members of lease groups: (queue, copy, delivery count, first delivery), by position.
local function place_field(queue, copy) return #queue .. ':' .. queue .. copy end

-- The next members at positions [first, past), at most limit.
local function read_members(group, first, past, limit)
  local members = {}
  local position, stop = math.max(first, group.first), math.min(past, group.span)
  while position < stop and #members < limit do
    local fields = {}
    for at = position, math.min(position + limit, stop) - 1 do fields[#fields + 1] = at end
    local values = redis.call('HMGET', members_key(group), unpack(fields))
    for i = 1, #fields do
      if values[i] and #members < limit then
        local member = cmsgpack.unpack(values[i])
        member.position = fields[i]
        members[#members + 1] = member
      end
    end
    position = position + #fields
  end
  return members
end

-- The members as a batch: their queues, each once, the queue index of each member, and their copies.
local function as_batch(members)
  local queues, queue_of, copies, numbers = {}, {}, {}, {}
  for i = 1, #members do
    local queue = members[i][1]
    if not numbers[queue] then
      queues[#queues + 1] = queue
      numbers[queue] = #queues
    end
    queue_of[i], copies[i] = numbers[queue], members[i][2]
  end
  return queues, queue_of, copies
end

-- Remove members whose leases have gone elsewhere for good. A group that is being formed forgets them, because no
-- client has seen them.
local function lose_members(group, members)
  local positions, places = {}, {}
  for i = 1, #members do
    positions[i] = members[i].position
    places[i] = place_field(members[i][1], members[i][2])
  end
  call_all('HDEL', members_key(group), positions)
  group.count = group.count - #members
  if group.state == FORMING then
    call_all('HDEL', places_key(group), places)
  else
    group.lost = group.lost + #members
  end
end
