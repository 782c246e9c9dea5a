-- The claim on a queue, and all its records at once: loading, writing back and dropping them.
--
-- Keys: those of records.lua, and
--   repeated  copies whose settled records stay (dedup.lua)
-- Arguments: size is the number of records, about, that one step looks at; times are microseconds.

local TRANSIENT = ('~'):byte() -- the first character of a copy id that is valid until its channel closes

-- The next epoch of a queue, above the highest one that the caller knows.
local function new_epoch(queue, above)
  local claimed = tonumber(redis.call('HGET', key_of('claims'), queue) or 0)
  local epoch = next_version(math.max(claimed, above))
  redis.call('HSET', key_of('claims'), queue, digits(epoch))
  return epoch
end

-- Claim the queue, and drop the records of its transient copies. Returns the epoch.
local function claim(queue)
  local epoch = new_epoch(queue, 0)
  local transient = {}
  for _, copy in ipairs(redis.call('HKEYS', key_of('live', queue))) do
    if copy:byte(1) == TRANSIENT then transient[#transient + 1] = copy end
  end
  call_all('HDEL', key_of('live', queue), transient)
  count_leases(queue, {}, transient)
  return cmsgpack.pack(epoch)
end

-- Write back records that their owner remembers and the store does not have. records: (state, lease id, leased_at,
-- microseconds until it is visible, count, first_at, epoch, target, target copy, reason) each. above: the owner's last
-- epoch, false except for the last part. With it the owner claims the queue again; until then the queue is unclaimed.
local function restore(queue, copies, records, above)
  local found, new = read_records(queue, copies), {}
  for i = 1, #copies do
    if not found[i] then
      local state, lease_id, leased_at, remaining, count, first_at, epoch, target, target_copy, reason =
        unpack(records[i])
      new[i] = pack_record({
        state = state, lease_id = lease_id, leased_at = leased_at, visible_at = now + remaining, count = count,
        first_at = first_at, changed_at = now, epoch = epoch, target = target, target_copy = target_copy,
        reason = reason,
      })
    end
  end
  write_records(queue, copies, false, new)
  return cmsgpack.pack(above and new_epoch(queue, above))
end

-- All queues that may have records, and the time.
local function list_queues() return cmsgpack.pack({ redis.call('HKEYS', key_of('claims')), now }) end

-- The next part of a queue's live records.
local function load_part(queue, cursor, size)
  local next_cursor, part = unpack(redis.call('HSCAN', key_of('live', queue), cursor, 'COUNT', size))
  local copies, places = {}, {}
  for i = 1, #part, 2 do
    copies[#copies + 1] = part[i]
    places[#places + 1] = place_of(part[i + 1])
  end
  return reply(next_cursor, copies, places)
end

-- The records of some copies, settled ones included.
local function peek(queue, copies)
  local places = {}
  for i, raw in ipairs(read_records(queue, copies)) do places[i] = place_of(raw) end
  return reply(places)
end

local function forget(queue, copies)
  call_all('HDEL', key_of('live', queue), copies)
  call_all('HDEL', key_of('settled', queue), copies)
  count_leases(queue, {}, copies)
  return cmsgpack.pack(true)
end

-- Drop all records of a queue. Its claim stays: epochs only grow.
local function drop_queue(queue)
  if counted_for(queue) then count_leases(queue, {}, redis.call('HKEYS', key_of('live', queue))) end
  redis.call('UNLINK', key_of('live', queue), key_of('settled', queue), key_of('order', queue))
  return cmsgpack.pack(true)
end

-- Drop the oldest settled records of a queue that changed before a time and have a minimum age: one step. Returns how
-- many were dropped, how many elements of the list were looked at, whether the next one is too young, and the length of
-- the list.
local function trim(queue, settled_before, age_min, size)
  local before = math.min(settled_before, now - age_min)
  local order = key_of('order', queue)
  local length = redis.call('LLEN', order)
  local gone, kept, seen, ends = {}, {}, 0, false
  local has_repeated = redis.call('EXISTS', key_of('repeated')) == 1

  -- Look at copies that were settled together; false if they are too young.
  local function look_at(copies)
    local found = read_fields(key_of('settled', queue), copies)
    for i = 1, #copies do
      local raw = found[i]
      -- A missing record was dropped in another way; only its entry in the list is left.
      if raw then
        if unpack_record(raw).changed_at >= before then return false end
        if has_repeated and redis.call('ZSCORE', key_of('repeated'), copies[i]) then
          kept[#kept + 1] = copies[i] -- may arrive a second time (ports.dedup); moves to the end of the list
        else
          gone[#gone + 1] = copies[i]
        end
      end
    end
    return true
  end

  while not ends and seen < math.min(length, size) and #gone + #kept < size do
    ends = not look_at(cmsgpack.unpack(redis.call('LRANGE', order, seen, seen)[1]))
    if not ends then seen = seen + 1 end
  end
  call_all('HDEL', key_of('settled', queue), gone)
  if seen > 0 then redis.call('LTRIM', order, seen, -1) end
  note_order(queue, kept)
  return cmsgpack.pack({ #gone, seen, ends, length })
end

-- Drop records that have not changed since a time, in the next part of a hash: the live ones or the settled ones.
-- Returns the next cursor, how many were dropped, the oldest change of the rest.
local function collect(queue, is_settled, cursor, size, before)
  local key = is_settled and key_of('settled', queue) or key_of('live', queue)
  local next_cursor, part = unpack(redis.call('HSCAN', key, cursor, 'COUNT', size))
  local gone, oldest = {}, false
  for i = 1, #part, 2 do
    local changed_at = unpack_record(part[i + 1]).changed_at
    if changed_at < before then
      gone[#gone + 1] = part[i]
    else
      oldest = math.min(oldest or changed_at, changed_at)
    end
  end
  call_all('HDEL', key, gone)
  return cmsgpack.pack({ next_cursor, #gone, oldest })
end
