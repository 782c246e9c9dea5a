-- Request: the subscription, the stream, the maximum number of members.
local of, stream, bite = request[1], request[2], request[3]
local row = read_stream(of, stream)
local key, group, waiting = nil, nil, 0
if row then
  each_group(of, stream, function(_, epoch, one)
    if epoch <= row[1] or one.state == RELEASING then
      waiting = waiting + 1
      if not key or epoch < key[3] then key, group = { of, stream, epoch }, one end
    end
  end)
end
if not group then return cmsgpack.pack({ now }) end

-- No client has read a group that was still being formed: it is given back, even if an ack covers it.
local is_ack = group.state == FROZEN
local ask = { group.lease_id, is_ack and 'ack' or 'release', 0, false, false, '', FOREVER }
local rule = rule_of(ask[2])
local members = read_members(group, 0, group.span, bite)
local queues, queue_of, copies = as_batch(members)
local found = read_batch(queues, queue_of, copies)
begin_changes(queues)
local statuses, places, done, lost, decided = {}, {}, 0, 0, {}
for i = 1, #members do
  local raw = found[i]
  local answer = decided[raw]
  if not answer then
    local status, new = decide_settle(raw, ask, rule)
    answer = { status, new, place_of(new or raw) }
    decided[raw] = answer
  end
  statuses[i], places[i] = answer[1], answer[3]
  if answer[2] then
    changed(queue_of[i], copies[i], answer[2])
    done = done + 1
  elseif answer[1] == LOST then
    lost = lost + 1
  end
end
write_changes(queues)
local is_last = #members < bite
if is_last then
  lost = lost + group.lost
  delete_group(key, group)
else
  local positions = {}
  for i = 1, #members do positions[i] = members[i].position end
  call_all('HDEL', members_key(group), positions)
  group.first = positions[#positions] + 1
  write_group(key, group)
end
if is_ack then
  row[2], row[3] = row[2] + done, row[3] + lost
  write_stream(of, stream, row)
end
local more = waiting > 1 or not is_last
return reply(reply_records, now, is_ack, queues, queue_of, copies, statuses, places, lost, more)
