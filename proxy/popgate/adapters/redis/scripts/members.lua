-- The members of lease groups: their leases are granted, renewed and settled together.
--
-- Keys: those of records.lua and groups.lua.
-- A member is (queue, copy, delivery count, first delivery).
-- Arguments: group_key is (subscription, stream, epoch), limit the maximum number of members; times are microseconds.

local function place_field(queue, copy) return #queue .. ':' .. queue .. copy end

-- The next members at positions [first, past), as a batch (records.lua), with their positions, delivery counts and
-- first deliveries.
local function members_between(group, first, past, limit)
  local batch = { queues = {}, queue_of = {}, copies = {}, positions = {}, counts = {}, firsts = {} }
  local numbers, n = {}, 0
  local position, stop = math.max(first, group.first), math.min(past, group.span)
  while position < stop and n < limit do
    local positions = {}
    for at = position, math.min(position + limit, stop) - 1 do positions[#positions + 1] = at end
    for i, raw in ipairs(read_fields(key_of('members', group.id), positions)) do
      if raw and n < limit then
        n = n + 1
        local queue
        queue, batch.copies[n], batch.counts[n], batch.firsts[n] = unpack(cmsgpack.unpack(raw))
        if not numbers[queue] then
          numbers[queue] = #batch.queues + 1
          batch.queues[numbers[queue]] = queue
        end
        batch.queue_of[n], batch.positions[n] = numbers[queue], positions[i]
      end
    end
    position = position + #positions
  end
  return batch
end

-- Remove members, by queue, copy and position, whose leases have gone elsewhere for good. A group that is being formed
-- forgets them, because no client has seen them.
local function lose_members(group, queues, copies, positions)
  call_all('HDEL', key_of('members', group.id), positions)
  group.count = group.count - #positions
  if group.state == FORMING then
    local places = {}
    for n = 1, #copies do places[n] = place_field(queues[n], copies[n]) end
    call_all('HDEL', key_of('places', group.id), places)
  else
    group.lost = group.lost + #positions
  end
end

-- Add the granted copies (queue, copy, former record, new record) of a batch whose leases end at ends_at. A new member
-- gets the next position. A member that lost its lease and gets it again keeps its position. If the group itself gave
-- it back because it was not its turn, it moves behind the messages that it waited for.
local function add_members(group_key, group, granted, ends_at)
  local fields = {}
  for n = 1, #granted do
    local queue, copy = unpack(granted[n])
    fields[n] = place_field(queue, copy)
  end
  local places = read_fields(key_of('places', group.id), fields)
  local queues, copies, positions = {}, {}, {} -- of those that were given back
  for n = 1, #granted do
    local queue, copy, raw = unpack(granted[n])
    local former = places[n] and raw and unpack_record(raw)
    if former and former.lease_id == group.lease_id and former.state == RELEASED then
      local at = #positions + 1
      queues[at], copies[at], positions[at], places[n] = queue, copy, places[n], false
    end
  end
  lose_members(group, queues, copies, positions)
  local rows, placed, span = {}, {}, group.span
  for n = 1, #granted do
    local queue, copy, _, raw = unpack(granted[n])
    local position, record = places[n], unpack_record(raw)
    if not position then
      position, span = span, span + 1
      placed[#placed + 1] = fields[n]
      placed[#placed + 1] = position
    end
    rows[#rows + 1] = position
    rows[#rows + 1] = cmsgpack.pack({ queue, copy, record.count, record.first_at })
  end
  call_all('HSET', key_of('members', group.id), rows)
  call_all('HSET', key_of('places', group.id), placed)
  group.count, group.span = group.count + span - group.span, span
  group.ends_at = math.min(group.ends_at, ends_at)
  write_group(group_key, group)
end

-- Grant one pop batch (granting.lua), whose copies become members. limit: as in limits.lua, or false.
local function grant_for_group(group_key, builder, limit, ...)
  local group, refused = formed_group(group_key, builder)
  if refused then return refused end
  local function add(granted, ends_at) add_members(group_key, group, granted, ends_at) end
  if limit then return grant_within(limit, add, ...) end
  local statuses, places = grant_batch(false, add, ...)
  return reply(statuses, places)
end

-- The members at positions [first, past).
local function read_members(group_key, first, past, limit)
  local group, refused = found_group(group_key)
  if refused then return refused end
  local batch = members_between(group, first, past, limit)
  local found, places = read_parts(parts_of(batch.queues, batch.queue_of, batch.copies)), {}
  for i = 1, #batch.copies do places[i] = place_of(found[i]) end
  return reply(batch.positions, batch.queues, batch.queue_of, batch.copies, batch.counts, batch.firsts, places)
end

-- Renew the leases of the members from a position on until ends_at. regrant: grant lost leases again. The decision is
-- domain.lease_group.decide_renewal. Returns also the next position, or false.
local function renew_group(group_key, first, ends_at, regrant, max_deliveries, generation, limit)
  local group, refused = found_group(group_key)
  if refused then return refused end
  local of = unpack(group_key)
  regrant = regrant and not is_overtaken(of, generation)
  local extend = settler(group.lease_id, 'extend', ends_at - now, false, false, '', FOREVER, of, generation)
  local answers = answers_of(function(raw)
    local status, new, is_unreadable = extend(raw)
    if status ~= DONE and raw and regrant and not is_unreadable then
      status, new = granter(group.lease_id, ends_at - now, max_deliveries, 0, unpack_record(raw).epoch)(raw)
    end
    return status, new, is_unreadable
  end)
  local batch = members_between(group, first, group.span, limit)
  local parts = parts_of(batch.queues, batch.queue_of, batch.copies)
  local found, new, places = read_parts(parts), {}, {}
  local queues, copies, positions = {}, {}, {} -- of the lost members
  for i = 1, #batch.copies do
    local answer = answers[found[i]]
    new[i], places[i] = answer.new, answer.new and answer.place or 0
    if not new[i] then
      local at = #positions + 1
      queues[at], copies[at], positions[at] = batch.queues[batch.queue_of[i]], batch.copies[i], batch.positions[i]
    end
  end
  write_parts(parts, new)
  lose_members(group, queues, copies, positions)
  local next_position = #batch.copies == limit and batch.positions[limit] + 1
  if not next_position then group.ends_at = ends_at end
  write_group(group_key, group)
  return reply(batch.queues, batch.queue_of, batch.copies, places, next_position)
end

-- The earliest group of a stream that has to be acked or released: its group_key and the group, and how many there are.
local function next_to_settle(of, stream, watermark)
  local earliest, group_key, group, count = nil, nil, nil, 0
  each_group(of, stream, function(one, its_key, _, epoch)
    if epoch <= watermark or one.state == RELEASING then
      count = count + 1
      if not earliest or epoch < earliest then earliest, group_key, group = epoch, its_key, one end
    end
  end)
  return group_key, group, count
end

-- Settle the next members of the earliest group of a stream that was acked or released. No client has read a group that
-- was still being formed: it is given back, even if an ack covers it. Returns whether it is an ack, the members, their
-- statuses and places, how many were lost and whether to go on; the time only if there is no such group.
local function settle_next(of, stream, limit)
  local s = read_stream(of, stream)
  local group_key, group, count
  if s then group_key, group, count = next_to_settle(of, stream, s.watermark) end
  if not group then return cmsgpack.pack({ now }) end

  local is_ack = group.state == FROZEN
  local action = is_ack and 'ack' or 'release'
  local answers = answers_of(settler(group.lease_id, action, 0, false, false, '', FOREVER))
  local batch = members_between(group, 0, group.span, limit)
  local parts = parts_of(batch.queues, batch.queue_of, batch.copies)
  local found, new, statuses, places, done, lost = read_parts(parts), {}, {}, {}, 0, 0
  for i = 1, #batch.copies do
    local answer = answers[found[i]]
    statuses[i], new[i], places[i] = answer.status, answer.new, answer.place
    if answer.status == DONE then done = done + 1 elseif answer.status == LOST then lost = lost + 1 end
  end
  write_parts(parts, new)
  local is_last = #batch.copies < limit
  if is_last then
    lost = lost + group.lost
    delete_group(group_key, group)
  else
    call_all('HDEL', key_of('members', group.id), batch.positions)
    group.first = batch.positions[limit] + 1
    write_group(group_key, group)
  end
  if is_ack then
    s.acked, s.lost = s.acked + done, s.lost + lost
    write_stream(of, stream, s)
  end
  local more = count > 1 or not is_last
  return reply(is_ack, batch.queues, batch.queue_of, batch.copies, statuses, places, lost, more)
end
