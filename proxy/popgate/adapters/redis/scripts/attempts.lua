-- The leases of each attempt of a client to pop.
--
-- Keys:
--   attempts      hash by field: (lease id, (queue, copy, copy, ...), ...)
--   attempt_ends  sorted set of the fields by the times of the next look at them
-- Arguments: field is the subscription and the attempt id as one string; times are microseconds.


-- An attempt is looked at after this time, and again if its leases have expired but may still be extended.
local LOOK_AGAIN = 900 * 1000000

local function attempt_field(subscription, attempt) return subscription .. '/' .. attempt end

-- Note the new leases of a batch. They are added to the attempt's earlier ones under the same lease id.
local function note_attempt(field, lease_id, ends_at, parts, new)
  local stored = redis.call('HGET', key_of('attempts'), field)
  local noted = stored and cmsgpack.unpack(stored)
  if not noted or noted[1] ~= lease_id then noted = { lease_id } end
  for p = 1, #parts do
    local queue, copies, places, run = parts[p].queue, parts[p].copies, parts[p].places, noted[#noted]
    for n = 1, #copies do
      if new[places and places[n] or n] then
        if run == lease_id or run[1] ~= queue then
          run = { queue }
          noted[#noted + 1] = run
        end
        run[#run + 1] = copies[n]
      end
    end
  end
  redis.call('HSET', key_of('attempts'), field, cmsgpack.pack(noted))
  redis.call('ZADD', key_of('attempt_ends'), math.min(ends_at, now + LOOK_AGAIN), field)
end

-- Call visit(queue, copy, record, raw) for each lease of an attempt that was neither settled nor granted to others
-- since.
local function each_good_lease(field, visit)
  local stored = redis.call('HGET', key_of('attempts'), field)
  if not stored then return end
  local noted = cmsgpack.unpack(stored)
  local lease_id = table.remove(noted, 1)
  for _, run in ipairs(noted) do
    local queue = table.remove(run, 1)
    local found = read_fields(key_of('live', queue), run)
    for i = 1, #run do
      local raw = found[i]
      if raw and (state_of(raw) == LEASED or state_of(raw) == EXPIRED) then
        local record = unpack_record(raw)
        if record.lease_id == lease_id then visit(queue, run[i], record, raw) end
      end
    end
  end
end

-- Returns the leases that have not ended.
local function find_attempt(field)
  local queues, copies, places = {}, {}, {}
  each_good_lease(field, function(queue, copy, record, raw)
    if record.state == LEASED and record.visible_at > now then
      queues[#queues + 1] = queue
      copies[#copies + 1] = copy
      places[#places + 1] = place_of(raw)
    end
  end)
  return reply(queues, copies, places)
end

-- Forget attempts that will never find a lease again. An attempt does not learn of extensions, and an expired lease can
-- be extended until another client gets the message. So no attempt is deleted before all its leases are settled, given
-- back or granted to others. Looks at up to limit attempts. Returns how many it looked at.
local function end_attempts(limit)
  local due = redis.call('ZRANGEBYSCORE', key_of('attempt_ends'), '-inf', '(' .. digits(now), 'LIMIT', 0, limit)
  for _, field in ipairs(due) do
    local look_again = false
    each_good_lease(field, function(_, _, record)
      look_again = math.max(look_again or now + LOOK_AGAIN, record.visible_at)
    end)
    if look_again then
      redis.call('ZADD', key_of('attempt_ends'), look_again, field)
    else
      redis.call('HDEL', key_of('attempts'), field)
      redis.call('ZREM', key_of('attempt_ends'), field)
    end
  end
  return cmsgpack.pack(#due)
end
