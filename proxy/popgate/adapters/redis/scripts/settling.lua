-- Settles leases: ack, extend, release, expire, and the moves.
--
-- Keys: those of records.lua and modes.lua.
-- The rule is domain.lease.decide_settle. A status is the index in its SettleStatus.
local DONE, ALREADY, LOST = 0, 1, 2

local function from(...)
  local states = {}
  for i = 1, select('#', ...) do states[(select(i, ...))] = true end
  return states
end

-- The rule of one action. Only this one is built: a script runs afresh for each batch, and most batches have one
-- action.
local function rule_of(action)
  if action == 'ack' then return { to = ACKED, from = from(LEASED, EXPIRED) } end
  if action == 'extend' then
    return { to = LEASED, from = from(LEASED, EXPIRED), repeatable = true, moves_deadline = true, extends = true }
  end
  if action == 'release' then
    return { to = RELEASED, from = from(LEASED, EXPIRED), moves_deadline = true, only_in_mode = true }
  end
  if action == 'withdraw' then
    return { to = RELEASED, from = from(LEASED, EXPIRED), moves_deadline = true, uncounted = 1 }
  end
  if action == 'expire' then
    return {
      to = EXPIRED, from = from(LEASED), repeatable = true, moves_deadline = true, only_visible = true, after_lease = true,
    }
  end
  if action == 'move' then return { to = MOVING, from = from(LEASED, EXPIRED), begins_move = true } end
  if action == 'exhaust' then
    return {
      to = MOVING, from = from(LEASED, EXPIRED, RELEASED), begins_move = true, only_visible = true, after_lease = true,
    }
  end
  if action == 'moved' then return { to = DEAD, from = from(MOVING) } end
  if action == 'undo' then return { to = RELEASED, from = from(MOVING), moves_deadline = true } end
  if action == 'discard' then
    return { to = DISCARDED, from = from(LEASED, EXPIRED, RELEASED), only_visible = true, of_any_lease = true }
  end
  error('no such action: ' .. tostring(action))
end

-- Takes what one ask says; the last two only if the mode matters. Returns decide(raw), which returns the status and, if
-- it is DONE, the new record.
local function settler(lease_id, action, duration, target, target_copy, reason, age_max, subscription, generation)
  local rule = rule_of(action)
  return function(raw)
    if not raw then return LOST end
    local r = readable_record(raw)
    if not r then return LOST, nil, true end -- the others of the batch are settled
    if r.lease_id ~= lease_id and not rule.of_any_lease then return LOST end
    if r.state == rule.to and not rule.repeatable then return ALREADY end
    if not rule.from[r.state] or (rule.only_visible and r.visible_at > now) then return LOST end
    local needs_mode = rule.only_in_mode
    local visible_at = rule.moves_deadline and now + duration or r.visible_at
    if rule.extends then
      local latest = r.leased_at + age_max
      if r.state == LEASED then latest = math.max(latest, r.visible_at) end
      if latest <= now then return LOST end
      needs_mode = r.state ~= LEASED or r.visible_at <= now -- it would revive the lease
      visible_at = math.min(visible_at, latest)
    end
    if needs_mode and subscription and is_overtaken(subscription, generation) then return LOST end
    if rule.begins_move then r.target, r.target_copy = target, target_copy end
    if reason ~= '' then
      local new, ended_at = reason, now
      if rule.after_lease then
        if r.state ~= LEASED then new = reason:match('^[^\31]*') end -- the attempt was recorded when it ended
        ended_at = r.visible_at
      end
      r.reason = noted(r, new, ended_at)
    end
    r.state, r.visible_at, r.changed_at = rule.to, visible_at, now
    if rule.uncounted then r.count, r.lease_id = r.count - rule.uncounted, 'withdrawn' end
    return DONE, pack_record(r)
  end
end

-- Missing records of an unclaimed queue are not lost for good: Redis has lost its data, and the owner will write them
-- back.
local function is_claimed(queue) return redis.call('HEXISTS', key_of('claims'), queue) == 1 end

-- Settle one batch. Arguments: a batch as in records.lua, and
--   first_of      index of the first entry with the same copy, or false if all copies differ
--   asks, ask_of  (lease id, action, microseconds, target, target copy, reason, greatest age[, subscription, mode
--                 generation]) each once, and the index of each copy's, or false
local function settle(queues, queue_of, copies, first_of, asks, ask_of)
  local parts = parts_of(queues, queue_of, copies)
  local found, new, answers, given = read_parts(parts), {}, {}, {}
  for a = 1, #asks do answers[a] = answers_of(settler(unpack(asks[a]))) end
  for i = 1, #copies do
    local first = first_of and first_of[i] or i
    local raw = new[first] or found[first]
    if not raw then
      local queue = queues[queue_of and queue_of[i] or 1]
      if not is_claimed(queue) then return redis.error_reply('POPGATE_UNCLAIMED queue ' .. queue .. ' has no claim') end
    end
    local answer = answers[ask_of and ask_of[i] or 1][raw]
    if answer.new then new[first] = answer.new end
    given[i] = answer
  end
  write_parts(parts, new)
  return reply(columns(given))
end
