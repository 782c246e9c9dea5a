-- Dedup ids.
--
-- Keys:
--   dedup:<topic>  hash by id: (copy id, message id or false if it is the copy id, queue index, time, is confirmed)
--   dedup_order    list of all ids as (time, topic, id) by time, so that the first to end come first
--   repeated       sorted set of copies that the broker may hold twice, by time; their settled records are not trimmed
-- Arguments: entries are (dedup id, copy id, message id, queue index) each; times are microseconds.
local noted = key_of('repeated')

-- The stored ids of the entries, packed, or false.
local function read_ids(topic, entries)
  local ids = {}
  for i = 1, #entries do ids[i] = entries[i][1] end
  return read_fields(key_of('dedup', topic), ids)
end

-- Call visit(id, copy, stored copy, message, index, time) for each entry that has the same copy as before and is not
-- confirmed.
local function each_pending(topic, entries, visit)
  local found = read_ids(topic, entries)
  for i = 1, #entries do
    if found[i] then
      local id, copy = unpack(entries[i])
      local stored, message, index, at, is_confirmed = unpack(cmsgpack.unpack(found[i]))
      if stored == copy and not is_confirmed then visit(id, copy, message, index, at) end
    end
  end
end

-- Reserve the ids that are free or older than window. Return the others: (index of the entry, copy id, message id,
-- queue index, is confirmed) each.
local function reserve(topic, window, entries)
  local found = read_ids(topic, entries)
  local others, new, order, repeated = {}, {}, {}, {}
  for i = 1, #entries do
    local id, copy, message, index = unpack(entries[i])
    local known, known_message, known_index, known_at, is_confirmed
    if found[i] then known, known_message, known_index, known_at, is_confirmed = unpack(cmsgpack.unpack(found[i])) end
    if not known or known_at <= now - window then
      new[#new + 1] = id
      new[#new + 1] = cmsgpack.pack({ copy, message ~= copy and message, index, now, false })
      order[#order + 1] = cmsgpack.pack({ now, topic, id })
    elseif is_confirmed or known ~= copy then
      others[#others + 1] = { i, known, known_message or known, known_index, is_confirmed }
      if not is_confirmed then
        repeated[#repeated + 1] = now
        repeated[#repeated + 1] = known
      end
    end
  end
  call_all('HSET', key_of('dedup', topic), new)
  call_all('RPUSH', key_of('dedup_order'), order)
  call_all('ZADD', noted, repeated)
  return cmsgpack.pack(others)
end

local function confirm(topic, entries)
  local confirmed = {}
  each_pending(topic, entries, function(id, copy, message, index, at)
    confirmed[#confirmed + 1] = id
    confirmed[#confirmed + 1] = cmsgpack.pack({ copy, message, index, at, true })
  end)
  call_all('HSET', key_of('dedup', topic), confirmed)
  return cmsgpack.pack(true)
end

-- Free the ids. One that another publish has found meanwhile may be stored by now, and stays.
local function cancel(topic, entries)
  local cancelled = {}
  each_pending(topic, entries, function(id, copy)
    if not redis.call('ZSCORE', noted, copy) then cancelled[#cancelled + 1] = id end
  end)
  call_all('HDEL', key_of('dedup', topic), cancelled)
  return cmsgpack.pack(true)
end

-- Entries of the topic that are left in the list are dropped when they end.
local function drop_topic(topic)
  redis.call('UNLINK', key_of('dedup', topic))
  return cmsgpack.pack(true)
end

-- Drop old ids and old notes of repeated copies: one step, which looks at limit of each. Return how many ids were
-- dropped, and whether to go on.
local function collect_ids(id_age, note_age, limit)
  local old = redis.call('ZRANGEBYSCORE', noted, '-inf', now - note_age, 'LIMIT', 0, limit)
  call_all('ZREM', noted, old)
  local order, seen, gone = redis.call('LRANGE', key_of('dedup_order'), 0, limit - 1), 0, 0
  for i = 1, #order do
    local at, topic, id = unpack(cmsgpack.unpack(order[i]))
    if at > now - id_age then break end
    local known = redis.call('HGET', key_of('dedup', topic), id)
    if known and cmsgpack.unpack(known)[4] == at then -- otherwise it was reserved again, further back in the list
      redis.call('HDEL', key_of('dedup', topic), id)
      gone = gone + 1
    end
    seen = i
  end
  if seen > 0 then redis.call('LTRIM', key_of('dedup_order'), seen, -1) end
  return cmsgpack.pack({ gone, #old == limit or seen == limit })
end
