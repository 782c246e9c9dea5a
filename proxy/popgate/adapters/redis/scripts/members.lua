-- Members of lease groups: (queue, copy, delivery count, first delivery), by position.
local function place_field(queue, copy) return #queue .. ':' .. queue .. copy end

-- The next members from position first on and below past, no more than limit.
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

-- Their queues, each once, which of them each member stands on, and their copies: as of any other batch.
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

-- They went elsewhere, for good. Of a group that is formed they are no members: nobody was told of them.
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
