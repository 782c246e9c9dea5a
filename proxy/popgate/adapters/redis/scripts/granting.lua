-- Grants the leases of one pop batch.
--
-- Keys: those of records.lua, modes.lua and attempts.lua.
-- The rule is domain.lease.decide_grant. A status is the index in its GrantStatus.
-- There is no path of its own for new copies, nor one in settling.lua for acks: both saved Redis an eighth of its time
-- for a batch of 32, but a message at most 2 % of what it costs in all.
local GRANTED, HELD, EXHAUSTED, IS_MOVING, SETTLED, FENCED, FULL, BEHIND, WRONG_MODE = 0, 1, 2, 3, 4, 5, 6, 7, 8

-- Returns decide(raw), which returns the status and, if it is GRANTED, the new record. earlier: the count of a copy
-- without a record. expired: by lease id, how to note the attempt of an expired lease; or false.
local function granter(lease_id, invisibility, max_deliveries, earlier, epoch, expired)
  return function(raw)
    local count, first_at, reason = earlier, now, ''
    if raw then
      local state = state_of(raw)
      if state >= ACKED then return SETTLED end
      if state == MOVING then return IS_MOVING end
      local r = unpack_record(raw)
      if r.visible_at > now then return HELD end
      if r.lease_id == lease_id and (state == LEASED or state == EXPIRED) then
        r.state, r.visible_at, r.changed_at = LEASED, now + invisibility, now
        return GRANTED, pack_record(r)
      end
      count, first_at = r.count, r.count > 0 and r.first_at or now
      if max_deliveries and count >= max_deliveries then return EXHAUSTED end
      local attempt = expired and expired[r.lease_id] or '\31e'
      reason = state == LEASED and noted(r, attempt, r.visible_at) or r.reason -- it keeps its attempts
    end
    return GRANTED, pack_record({
      state = LEASED, lease_id = lease_id, leased_at = now, visible_at = now + invisibility, count = count + 1,
      first_at = first_at, changed_at = now, epoch = epoch, reason = reason,
    })
  end
end

-- The epochs of the claims on some queues.
local function read_claims(queues)
  local claims = read_fields(key_of('claims'), queues)
  for q = 1, #queues do
    -- So that every queue with records is listed, claimed or not, and housekeeping finds them all.
    if not claims[q] then redis.call('HSET', key_of('claims'), queues[q], '0') end
    claims[q] = tonumber(claims[q] or 0)
  end
  return claims
end

-- Arguments: a batch as in records.lua, and
--   first_of             index of the first entry with the same copy, or false if all copies differ
--   asks, ask_of         (epoch, earlier deliveries) each once, and the index of each copy's, or false
--   lines                the line of each copy, 0 if it is in none; or false
--   attempt              attempt id, or false
--   expired              as in granter
--   invisibility         microseconds
-- left: the number of leases that a limit leaves, or false; copies beyond it are FULL. add_members, or false: is called
-- with (queue, copy, former record, new record) of each granted copy and the end of the leases. Returns the statuses
-- and the places of the records, and how many copies were granted and FULL.
local function grant_batch(left, add_members, subscription, queues, lease_id, invisibility, max_deliveries, generation,
    queue_of, copies, first_of, asks, ask_of, lines, attempt, expired)
  if #copies == 0 or is_overtaken(subscription, generation) then return WRONG_MODE, 0, 0, 0 end
  local claims, epochs, answers = read_claims(queues), {}, {}
  for a = 1, #asks do
    local epoch, earlier = unpack(asks[a])
    epochs[a], answers[a] = epoch, answers_of(granter(lease_id, invisibility, max_deliveries, earlier, epoch, expired))
  end
  local parts = parts_of(queues, queue_of, copies)
  local found, new, given, granted, full = read_parts(parts), {}, {}, 0, 0
  local is_held_up = lines and {} -- the lines with a copy that was not granted
  for i = 1, #copies do
    local a, q = ask_of and ask_of[i] or 1, queue_of and queue_of[i] or 1
    local answer
    if epochs[a] < claims[q] then
      answer = { status = FENCED, place = 0 }
    elseif is_held_up and is_held_up[lines[i]] then
      answer = { status = BEHIND, place = 0 }
    else
      local first = first_of and first_of[i] or i
      answer = answers[a][new[first] or found[first]]
      if answer.status == GRANTED then
        if new[first] then
          new[first] = answer.new
        elseif granted == left then
          answer, full = { status = FULL, place = 0 }, full + 1
        else
          new[first], granted = answer.new, granted + 1
        end
      end
    end
    given[i] = answer
    if lines and answer.status ~= GRANTED and answer.status ~= SETTLED then is_held_up[lines[i]] = lines[i] > 0 end
  end
  if granted > 0 then
    write_parts(parts, new)
    if attempt then note_attempt(attempt_field(subscription, attempt), lease_id, now + invisibility, parts, new) end
    if add_members then
      local members = {}
      for i = 1, #copies do
        if new[i] then
          members[#members + 1] = { queues[queue_of and queue_of[i] or 1], copies[i], found[i], new[i] }
        end
      end
      add_members(members, now + invisibility)
    end
  end
  local statuses, places = columns(given)
  return statuses, places, granted, full
end

local function grant(...)
  local statuses, places = grant_batch(false, false, ...)
  return reply(statuses, places)
end
