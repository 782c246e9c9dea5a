-- Lease records, which adapters/redis/records.py reads.
--
-- Keys:
--   live:<queue>        hash by copy: the unsettled records
--   settled:<queue>     hash by copy: the settled ones; a new owner loads the live ones only
--   order:<queue>       list of the settled copies in the order of settlement, for trimming; copies that were settled
--                       together are packed together
--   claims              hash by queue: the epoch of its claim; it has every queue that may have records
--   limited             hash by queue: the subscription that counts the leases of the queue (limits.lua)
--   out:<subscription>  sorted set of the counted leases by their ends: ended leases count no more
-- A record is (state, lease id, leased_at, visible_at, count, first_at, changed_at, epoch[, target, target copy,
-- reason]). Times are distances from leased_at, so that most take one byte.
-- Arguments of a batch: queues has each queue once; copies; queue_of has the index in queues of each copy, or is false
-- if all copies are in the first.
local LEASED, EXPIRED, RELEASED, MOVING, ACKED, DEAD, DISCARDED = 0, 1, 2, 3, 4, 5, 6 -- append only; from 4 on settled
local TOGETHER = 256 -- copies in one element of order

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
  local state, lease_id, leased, visible_after, count, first_after, changed_after, epoch, target, target_copy, reason =
    unpack(cmsgpack.unpack(raw))
  return {
    state = state, lease_id = lease_id, leased_at = leased, visible_at = leased + visible_after, count = count,
    first_at = leased + first_after, changed_at = leased + changed_after, epoch = epoch, target = target or false,
    target_copy = target_copy or false, reason = reason or '',
  }
end

-- The reason of a record with one more attempt, as domain.attempts.noted. ended_at: when the attempt of new ended.
local ATTEMPTS_MAX = 8
local function noted(r, new, ended_at)
  local head, attempt = new:match('^([^\31]*)\31(.*)$')
  local old_head, attempts = r.reason:match('^([^\31]*)(.*)$')
  if attempt then
    local function ms(at) return math.floor(at / 1000) end
    attempts = attempts .. '\31' .. string.format('%d,%.0f,%.0f,', r.count, ms(r.leased_at), ms(ended_at)) .. attempt
  else
    head = new
  end
  local _, surplus = attempts:gsub('\31', '')
  for _ = ATTEMPTS_MAX + 1, surplus do attempts = attempts:match('^\31[^\31]*(.*)$') end
  return (head ~= '' and head or old_head) .. attempts
end

-- The record, or nil if this popgate can't read it, because it is damaged or that of a newer popgate.
local function readable_record(raw)
  local is_unpacked, r = pcall(unpack_record, raw)
  local is_known = raw:byte(1) == 152 or raw:byte(1) == 155
  return is_unpacked and is_known and type(r.state) == 'number' and r.state <= DISCARDED and r or nil
end

-- The state is the byte after the array's header.
local function state_of(raw) return raw:byte(2) end

-- The records of some copies of a queue, settled ones included; false for a copy without one.
local function read_records(queue, copies)
  local found = read_fields(key_of('live', queue), copies)
  local count = 0
  for i = 1, #copies do
    if found[i] then count = count + 1 end
  end
  if count == #copies then return found end
  local settled_key = key_of('settled', queue)
  if count == 0 then return read_fields(settled_key, copies) end
  local missing, places = {}, {}
  for i = 1, #copies do
    if not found[i] then missing[#missing + 1], places[#places + 1] = copies[i], i end
  end
  local settled = read_fields(settled_key, missing)
  for n = 1, #missing do found[places[n]] = settled[n] end
  return found
end

-- A batch by queues: the copies of each, and their places in the batch; without places, a copy's place is its index.
local function parts_of(queues, queue_of, copies)
  if not queue_of then return { { queue = queues[1], copies = copies } } end
  local parts = {}
  for q = 1, #queues do parts[q] = { queue = queues[q], copies = {}, places = {} } end
  for i = 1, #copies do
    local part = parts[queue_of[i]]
    local n = #part.copies + 1
    part.copies[n], part.places[n] = copies[i], i
  end
  return parts
end

-- The records of a batch.
local function read_parts(parts)
  local found = {}
  for p = 1, #parts do
    local places, records = parts[p].places, read_records(parts[p].queue, parts[p].copies)
    if not places then return records end
    for n = 1, #records do found[places[n]] = records[n] end
  end
  return found
end

-- The subscription that counts the leases of a queue; most queues have none.
local function counted_for(queue) return has_limits and redis.call('HGET', key_of('limited'), queue) end

-- How a counted lease is named.
local function out_member(queue, copy) return queue .. '\0' .. copy end

-- Count the leases among these live records, (copy, record) alternately, and none of the other copies.
local function count_leases(queue, live, others)
  local subscription = counted_for(queue)
  if not subscription then return end
  local leased, not_leased = {}, {}
  for i = 1, #others do not_leased[i] = out_member(queue, others[i]) end
  for i = 1, #live, 2 do
    if state_of(live[i + 1]) == LEASED then
      leased[#leased + 1] = unpack_record(live[i + 1]).visible_at
      leased[#leased + 1] = out_member(queue, live[i])
    else
      not_leased[#not_leased + 1] = out_member(queue, live[i])
    end
  end
  call_all('ZREM', key_of('out', subscription), not_leased)
  call_all('ZADD', key_of('out', subscription), leased)
end

-- Note that these copies of a queue were settled now, together.
local function note_order(queue, copies)
  for first = 1, #copies, TOGETHER do
    local last = math.min(first + TOGETHER - 1, #copies)
    local together = last - first + 1 == #copies and copies or { unpack(copies, first, last) }
    redis.call('RPUSH', key_of('order', queue), cmsgpack.pack(together))
  end
end

-- Write the new records of some copies of a queue. new: by the copy's place; copies without one stay as they are.
local function write_records(queue, copies, places, new)
  local live, settled, n_live, n_settled, former, is_live = {}, {}, 0, 0, nil, nil
  for n = 1, #copies do
    local raw = new[places and places[n] or n]
    if raw then
      if raw ~= former then former, is_live = raw, state_of(raw) < ACKED end -- most are equal
      if is_live then
        live[n_live + 1], live[n_live + 2] = copies[n], raw
        n_live = n_live + 2
      else
        settled[n_settled + 1], settled[n_settled + 2] = copies[n], raw
        n_settled = n_settled + 2
      end
    end
  end
  local ended = copies
  if n_settled < 2 * #copies then
    ended = {}
    for i = 1, n_settled, 2 do ended[#ended + 1] = settled[i] end
  end
  if #ended > 0 then
    -- Delete first: when its memory is full, Redis refuses a script whose first write may need more, and a settlement
    -- only moves its record. So leases can still be settled then, and settled records are trimmed.
    call_all('HDEL', key_of('live', queue), ended)
    call_all('HSET', key_of('settled', queue), settled)
    note_order(queue, ended)
  end
  call_all('HSET', key_of('live', queue), live)
  count_leases(queue, live, ended)
end

-- Write the new records of a batch. new: by place in the batch.
local function write_parts(parts, new)
  for p = 1, #parts do write_records(parts[p].queue, parts[p].copies, parts[p].places, new) end
end

-- The records of a reply, each once: copies that were leased together have equal records, which the caller decodes
-- once. A place of 0 stands for no record.
local reply_records, reply_places = {}, {}
local function place_of(raw)
  if not raw then return 0 end
  local place = reply_places[raw]
  if not place then
    place = #reply_records + 1
    reply_records[place], reply_places[raw] = raw, place
  end
  return place
end

-- The answer about a copy in a batch: its status, its new record if it gets one, and the place of its record in the
-- reply. answers_of(decide)[raw] is that of decide(raw), which returns the status, perhaps the new record, and whether
-- the reply must not contain the record because it can't be read; equal records are decided once.
local function answers_of(decide)
  return setmetatable({}, { __index = function(answers, raw)
    local status, new, is_unreadable = decide(raw)
    local answer = { status = status, new = new, place = is_unreadable and 0 or place_of(new or raw) }
    answers[raw] = answer
    return answer
  end })
end

-- The statuses and the places of a batch's answers; one of each if all entries have the same answer.
local function columns(given)
  for i = 2, #given do
    if given[i] ~= given[1] then
      local statuses, places = {}, {}
      for n = 1, #given do statuses[n], places[n] = given[n].status, given[n].place end
      return statuses, places
    end
  end
  return given[1].status, given[1].place
end

-- One MessagePack array of the time, the values and the records, which are MessagePack already and are not packed
-- twice.
local function reply(...)
  return string.char(146 + select('#', ...)) .. cmsgpack.pack(now, ...) .. '\221'
    .. struct.pack('>I4', #reply_records) .. table.concat(reply_records)
end
