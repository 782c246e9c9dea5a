-- One settlement batch. Request: queues, queue_of, copies, asks, ask_of. queue_of or ask_of false: all copies have the
-- first queue or ask.
local queues, queue_of, copies, asks, ask_of = unpack(request)
local found = read_batch(queues, queue_of, copies)
begin_changes(queues)
local rules, decided = {}, {}
for a = 1, #asks do rules[a], decided[a] = rule_of(asks[a][2]), {} end
local statuses, places = {}, {}

-- Missing records of an unclaimed queue are not lost for good: Redis has lost its data, and the owner will write them
-- back.
local function is_claimed(queue) return redis.call('HEXISTS', prefix .. 'claims', queue) == 1 end

for i = 1, #copies do
  local q = queue_of and queue_of[i] or 1
  local a = ask_of and ask_of[i] or 1
  local copy = copies[i]
  local raw = changes[q][copy] or found[i]
  if not raw and not is_claimed(queues[q]) then
    return redis.error_reply('POPGATE_UNCLAIMED nobody has claimed queue ' .. queues[q])
  end
  local answer = decided[a][raw] -- copies that were leased together get one answer
  if not answer then
    local status, new = decide_settle(raw, asks[a], rules[a])
    answer = { status, new, place_of(new or raw) }
    decided[a][raw] = answer
  end
  if answer[2] then changed(q, copy, answer[2]) end
  statuses[i], places[i] = answer[1], answer[3]
end
write_changes(queues)
return reply(reply_records, now, statuses, places)
