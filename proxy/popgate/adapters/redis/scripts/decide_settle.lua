-- The same as domain.lease.decide_settle; a status is the index in its SettleStatus.
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
  if action == 'release' then return { to = RELEASED, from = from(LEASED, EXPIRED), moves_deadline = true } end
  if action == 'withdraw' then
    return { to = RELEASED, from = from(LEASED, EXPIRED), moves_deadline = true, uncounted = 1 }
  end
  if action == 'expire' then
    return { to = EXPIRED, from = from(LEASED), repeatable = true, moves_deadline = true, only_visible = true }
  end
  if action == 'move' then return { to = MOVING, from = from(LEASED, EXPIRED), begins_move = true } end
  if action == 'exhaust' then
    return { to = MOVING, from = from(LEASED, EXPIRED, RELEASED), begins_move = true, only_visible = true }
  end
  if action == 'moved' then return { to = DEAD, from = from(MOVING) } end
  if action == 'undo' then return { to = RELEASED, from = from(MOVING), moves_deadline = true } end
  if action == 'discard' then
    return { to = DISCARDED, from = from(LEASED, EXPIRED, RELEASED), only_visible = true, of_any_lease = true }
  end
  error('no such action: ' .. tostring(action))
end

-- Whether the subscription's grants need a later mode generation.
local function is_overtaken(subscription, generation)
  return subscription and tonumber(redis.call('HGET', prefix .. 'modes', subscription) or 0) > generation
end

-- ask: lease id, action, microseconds, target, target copy, reason, greatest age; if the mode matters, also the
-- subscription and the caller's mode generation. Returns the status and, if it is DONE, the new record.
local function decide_settle(raw, ask, rule)
  if not raw then return LOST end
  local r = unpack_record(raw)
  if r.lease_id ~= ask[1] and not rule.of_any_lease then return LOST end
  if r.state == rule.to and not rule.repeatable then return ALREADY end
  if not rule.from[r.state] or (rule.only_visible and r.visible_at > now) then return LOST end
  if ask[2] == 'release' and is_overtaken(ask[8], ask[9]) then return LOST end
  local visible_at = rule.moves_deadline and now + ask[3] or r.visible_at
  if rule.extends then
    local latest = r.leased_at + ask[7]
    if r.state == LEASED then latest = math.max(latest, r.visible_at) end
    if latest <= now then return LOST end
    if (r.state ~= LEASED or r.visible_at <= now) and is_overtaken(ask[8], ask[9]) then return LOST end
    visible_at = math.min(visible_at, latest)
  end
  if rule.begins_move then r.target, r.target_copy = ask[4], ask[5] end
  if ask[6] ~= '' then r.reason = ask[6] end
  r.state, r.visible_at, r.changed_at = rule.to, visible_at, now
  if rule.uncounted then r.count, r.lease_id = r.count - rule.uncounted, 'withdrawn' end
  return DONE, pack_record(r)
end
