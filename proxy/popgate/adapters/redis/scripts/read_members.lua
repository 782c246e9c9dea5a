-- Request: the key, the positions [first, past), the maximum number of members.
local group, refused = found_group(request[1])
if refused then return refused end
local members = read_members(group, request[2], request[3], request[4])
local queues, queue_of, copies = as_batch(members)
local found = read_batch(queues, queue_of, copies)
local positions, counts, firsts, places = {}, {}, {}, {}
for i = 1, #members do
  positions[i], counts[i], firsts[i] = members[i].position, members[i][3], members[i][4]
  places[i] = place_of(found[i])
end
return reply(reply_records, now, positions, queues, queue_of, copies, counts, firsts, places)
