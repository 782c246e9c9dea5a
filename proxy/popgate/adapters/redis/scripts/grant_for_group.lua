-- One pop batch that makes members of a lease group. Request: [14] the group's key, [15] its builder; the rest see
-- granting.lua.
local group, refused = formed_group(request[14], request[15])
if refused then return refused end
grant_all()

-- A new member gets the next position. A member that lost its lease and gets it again keeps its position. If the group
-- itself gave it back because it was not its turn, it moves behind the messages that it waited for.
local function add_members()
  local fields, places = {}, {}
  for n = 1, #granted do
    local i = granted[n]
    fields[n] = place_field(queues[queue_of and queue_of[i] or 1], copies[i])
  end
  read_fields(places_key(group), fields, nil, places)
  local returned = {}
  for n = 1, #granted do
    local i = granted[n]
    local former = places[n] and found[i] and unpack_record(found[i])
    if former and former.lease_id == group.lease_id and former.state == RELEASED then
      returned[#returned + 1] = { queues[queue_of and queue_of[i] or 1], copies[i], position = places[n] }
      places[n] = false
    end
  end
  lose_members(group, returned)
  local rows, placed, span = {}, {}, group.span
  for n = 1, #granted do
    local i = granted[n]
    local q, position = queue_of and queue_of[i] or 1, places[n]
    if not position then
      position, span = span, span + 1
      placed[#placed + 1] = fields[n]
      placed[#placed + 1] = position
    end
    local record = unpack_record(changes[q][copies[i]])
    rows[#rows + 1] = position
    rows[#rows + 1] = cmsgpack.pack({ queues[q], copies[i], record.count, record.first_at })
  end
  call_all('HSET', members_key(group), rows)
  call_all('HSET', places_key(group), placed)
  group.count, group.span = group.count + span - group.span, span
  group.ends_at = math.min(group.ends_at, now + invisibility)
  write_group(request[14], group)
end

if #granted > 0 then
  write_changes(queues)
  if request[11] then note_attempt(request[11]) end
  add_members()
end
return reply_granted()
