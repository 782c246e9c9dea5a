-- Reads and writes the records of a batch.

-- The subscription that counts the leases of a queue for its max_in_flight (counting.lua); most queues have none. The
-- sorted set "out" has the leases by their ends: ended leases count no more.
local function counted_for(queue) return has_limits and redis.call('HGET', prefix .. 'limited', queue) end
local function out_key(name) return prefix .. 'out:' .. name end
local function out_member(queue, copy) return queue .. '\0' .. copy end

-- Stop counting these copies of a queue: they have no leases and no records any more.
local function uncount(queue, copies)
  local name = counted_for(queue)
  if not name then return end
  local members = {}
  for i = 1, #copies do members[i] = out_member(queue, copies[i]) end
  call_all('ZREM', out_key(name), members)
end

-- Like read_fields, for the records of a queue, settled ones included.
local function read_records(queue, copies, places, found)
  read_fields(live_key(queue), copies, places, found)
  local missing, where = {}, {}
  for i = 1, #copies do
    local place = places and places[i] or i
    if not found[place] then
      missing[#missing + 1] = copies[i]
      where[#where + 1] = place
    end
  end
  if #missing > 0 then read_fields(settled_key(queue), missing, where, found) end
end

-- The records of a batch: for each entry one or false. queue_of false: all entries are in the first queue.
local function read_batch(queues, queue_of, copies)
  local found = {}
  if not queue_of then
    if #copies > 0 then read_records(queues[1], copies, nil, found) end
    return found
  end
  local fields, places = {}, {}
  for q = 1, #queues do fields[q], places[q] = {}, {} end
  for i = 1, #copies do
    local q = queue_of[i]
    fields[q][#fields[q] + 1] = copies[i]
    places[q][#places[q] + 1] = i
  end
  for q = 1, #queues do read_records(queues[q], fields[q], places[q], found) end
  return found
end

-- Count the leases among the written records, and uncount the other records.
local function count_records(name, queue, copies, raws)
  local leased, others, ends = {}, {}, {}
  for i = 1, #copies do
    local raw = raws[copies[i]]
    if state_of(raw) == LEASED then
      if not ends[raw] then ends[raw] = unpack_record(raw).visible_at end
      leased[#leased + 1] = ends[raw]
      leased[#leased + 1] = out_member(queue, copies[i])
    else
      others[#others + 1] = out_member(queue, copies[i])
    end
  end
  call_all('ZREM', out_key(name), others)
  call_all('ZADD', out_key(name), leased)
end

-- Write the records of a queue. raws: records by copy; copies: in order, each once.
local function write_records(queue, copies, raws)
  local ended, settled, live = {}, {}, {}
  local former, is_live
  for i = 1, #copies do
    local copy = copies[i]
    local raw = raws[copy]
    if raw ~= former then former, is_live = raw, state_of(raw) < ACKED end -- most are equal
    if is_live then
      live[#live + 1] = copy
      live[#live + 1] = raw
    else
      ended[#ended + 1] = copy
      settled[#settled + 1] = copy
      settled[#settled + 1] = raw
    end
  end
  if #ended > 0 then settle_records(queue, ended, settled) end
  call_all('HSET', live_key(queue), live)
  local name = counted_for(queue)
  if name then count_records(name, queue, copies, raws) end
end

-- Records to write: changed(q, copy, raw) notes one, changes[q][copy] finds it, write_changes() writes all.
local changes, changed_copies = {}, {}
local function changed(q, copy, raw)
  local of_queue = changes[q]
  if not of_queue[copy] then
    local copies = changed_copies[q]
    copies[#copies + 1] = copy
  end
  of_queue[copy] = raw
end

local function begin_changes(queues)
  for q = 1, #queues do changes[q], changed_copies[q] = {}, {} end
end

local function write_changes(queues)
  for q = 1, #queues do write_records(queues[q], changed_copies[q], changes[q]) end
end

-- The records of a reply, each once: copies that were leased together have equal records, which the caller decodes
-- once.
local reply_records, reply_places = {}, {}
local function place_of(raw)
  if not raw then return 0 end
  local place = reply_places[raw]
  if not place then
    place = #reply_records + 1
    reply_records[place] = raw
    reply_places[raw] = place
  end
  return place
end
