-- Lease records, which adapters/redis/records.py reads. Each queue has one hash of unsettled records and one of settled
-- ones, so that a new owner loads the live records only, without those of the last quarter of an hour. A list has the
-- settled copies in the order of settlement, for trimming; copies that were settled together are packed together. Times
-- are stored as distances from leased_at, so that most take one byte.
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

-- The state is the byte after the array's header.
local function state_of(raw) return raw:byte(2) end

-- Note that these copies of a queue were settled now, together, as one or a few elements of the list.
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

-- Write settled records. pairs: each copy followed by its new record.
local function settle_records(queue, copies, pairs)
  -- Delete first: when its memory is full, Redis refuses a script whose first write may need more, and a settlement
  -- only moves its record. So leases can still be settled then, and settled records are trimmed.
  call_all('HDEL', live_key(queue), copies)
  call_all('HSET', settled_key(queue), pairs)
  note_order(queue, copies)
end

-- found[place] = the field's value or false; without places, a field's place is its own index.
local function read_fields(key, fields, places, found)
  for first = 1, #fields, CHUNK do
    local last = math.min(first + CHUNK - 1, #fields)
    local values = redis.call('HMGET', key, unpack(fields, first, last))
    for i = first, last do
      found[places and places[i] or i] = values[i - first + 1]
    end
  end
end

-- Whether none of these fields exists.
local function is_new(key, fields)
  local found = {}
  read_fields(key, fields, nil, found)
  for i = 1, #fields do
    if found[i] then return false end
  end
  return true
end
