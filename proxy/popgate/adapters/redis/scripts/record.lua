-- Lease records: what adapters/redis/records.py reads. Those that are not settled stand in one hash a queue, the settled
-- in another, so that a new owner loads what is live and not the last quarter of an hour. A list has the settled ones in
-- the order of their settlement, for trimming, packed as they were settled together. Times are kept as distances from leased_at: most are then one byte.
local LEASED, EXPIRED, RELEASED, MOVING, ACKED, DEAD, DISCARDED = 0, 1, 2, 3, 4, 5, 6 -- append only; from 4 on settled

local function live_key(queue) return prefix .. 'live:' .. queue end
local function settled_key(queue) return prefix .. 'settled:' .. queue end
local function order_key(queue) return prefix .. 'order:' .. queue end

local function pack_record(r)
  local leased = r.leased_at
  if r.target or r.target_copy or r.reason ~= '' then
    return '\155' .. cmsgpack.pack(r.state, r.lease_id, leased, r.visible_at - leased, r.count, r.first_at - leased,
      r.changed_at - leased, r.epoch, r.target or false, r.target_copy or false, r.reason)
  end
  return '\152' .. cmsgpack.pack(r.state, r.lease_id, leased, r.visible_at - leased, r.count, r.first_at - leased,
    r.changed_at - leased, r.epoch)
end

local function unpack_record(raw)
  local t = cmsgpack.unpack(raw)
  local leased = t[3]
  return {
    state = t[1], lease_id = t[2], leased_at = leased, visible_at = leased + t[4], count = t[5],
    first_at = leased + t[6], changed_at = leased + t[7], epoch = t[8],
    target = t[9] or false, target_copy = t[10] or false, reason = t[11] or '',
  }
end

-- The state is the byte behind the array's header.
local function state_of(raw) return raw:byte(2) end

-- Note that these copies of a queue were settled now, together: one element of the list, or a few.
local TOGETHER = 256
local function note_order(queue, ended)
  if #ended <= TOGETHER then
    redis.call('RPUSH', order_key(queue), cmsgpack.pack(ended))
    return
  end
  for first = 1, #ended, TOGETHER do
    redis.call('RPUSH', order_key(queue),
      cmsgpack.pack({ unpack(ended, first, math.min(first + TOGETHER - 1, #ended)) }))
  end
end

-- Write settled records: pairs has each copy and what stands for it from now on.
local function settle_records(queue, copies, pairs)
  -- The deletion first: a Redis whose memory is full refuses a script's first write that may take more, and a settlement
  -- only moves its record. So what is leased can be settled then, and what is settled is trimmed.
  call_all('HDEL', live_key(queue), copies)
  call_all('HSET', settled_key(queue), pairs)
  note_order(queue, copies)
end

-- found[place] = the field's value or false; fields without places stand at their own.
local function read_fields(key, fields, places, found)
  for first = 1, #fields, CHUNK do
    local last = math.min(first + CHUNK - 1, #fields)
    local values = redis.call('HMGET', key, unpack(fields, first, last))
    for i = first, last do
      found[places and places[i] or i] = values[i - first + 1]
    end
  end
end

-- Whether none of these fields is there.
local function is_new(key, fields)
  local found = {}
  read_fields(key, fields, nil, found)
  for i = 1, #fields do
    if found[i] then return false end
  end
  return true
end
