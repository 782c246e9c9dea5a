-- The same as domain.lease.decide_grant; a status is the index in its GrantStatus.
local GRANTED, HELD, EXHAUSTED, IS_MOVING, SETTLED, FENCED, FULL, BEHIND, WRONG_MODE = 0, 1, 2, 3, 4, 5, 6, 7, 8

-- Returns the status and, if it is GRANTED, the new record.
local function decide_grant(raw, lease_id, invisibility, max_deliveries, earlier, epoch)
  local count, first_at
  if not raw then
    count, first_at = earlier, now
  else
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
  end
  return GRANTED, pack_record({
    state = LEASED, lease_id = lease_id, leased_at = now, visible_at = now + invisibility, count = count + 1,
    first_at = first_at, changed_at = now, epoch = epoch, reason = '',
  })
end
