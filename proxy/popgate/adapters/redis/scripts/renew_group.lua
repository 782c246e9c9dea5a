-- Request: the key, the first position, the end of the leases, whether to regrant lost leases, max deliveries, mode
-- generation, the maximum number of members. The decision is domain.lease_group.decide_renewal.
local key, ends_at, regrant = request[1], request[3], request[4]
local group, refused = found_group(key)
if refused then return refused end
regrant = regrant and not is_overtaken(key[1], request[6])

local extend = rule_of('extend')
local ask = { group.lease_id, 'extend', ends_at - now, false, false, '', FOREVER, key[1], request[6] }
local function decide_renewal(raw)
  if not raw then return false end
  local status, extended = decide_settle(raw, ask, extend)
  if status == DONE then return extended end
  if not regrant then return false end
  local granted, again = decide_grant(raw, group.lease_id, ends_at - now, request[5], 0, unpack_record(raw).epoch)
  return granted == GRANTED and again
end

local members = read_members(group, request[2], group.span, request[7])
local queues, queue_of, copies = as_batch(members)
local found = read_batch(queues, queue_of, copies)
begin_changes(queues)
local lost, places, decided = {}, {}, {}
for i = 1, #members do
  local raw = found[i]
  local new = decided[raw]
  if new == nil then
    new = decide_renewal(raw)
    decided[raw] = new
  end
  if new then changed(queue_of[i], copies[i], new) else lost[#lost + 1] = members[i] end
  places[i] = place_of(new)
end
write_changes(queues)
lose_members(group, lost)
local next_position = #members == request[7] and members[#members].position + 1
if not next_position then group.ends_at = ends_at end
write_group(key, group)
return reply(reply_records, now, queues, queue_of, copies, places, next_position)
