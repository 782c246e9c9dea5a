-- Dedup ids: one hash per topic, and one list of all ids in the order of their times, so that the first to end come
-- first. An id is (copy id, message id or false if it is the copy id, queue index, time, whether it is confirmed).
local function ids_key(topic) return prefix .. 'dedup:' .. topic end

-- The stored ids of the entries, unpacked, or false.
local function read_ids(topic, entries)
  local found = {}
  for first = 1, #entries, CHUNK do
    local ids = {}
    for i = first, math.min(first + CHUNK - 1, #entries) do ids[#ids + 1] = entries[i][1] end
    local values = redis.call('HMGET', ids_key(topic), unpack(ids))
    for i = 1, #ids do found[first + i - 1] = values[i] and cmsgpack.unpack(values[i]) end
  end
  return found
end
