-- Decides one pop batch. Request: [1] subscription, [2] lease id, [3] microseconds, [4] max deliveries, [5] mode
-- generation, [6] queues, [7] queue_of, [8] copies, [9] asks, [10] ask_of, [11] attempt id, [12] lines, [13] whether
-- each copy occurs once, [14] and [15] see grant_for_group.lua, [16] limit. An ask is (epoch, earlier deliveries).
-- queue_of or ask_of false: all copies have the first queue or ask. lines has the line of each copy, 0 if it is in
-- none; false: no copy is in a line. Copies that exceed the limit, if there is one, are FULL.
local subscription, lease_id, invisibility = request[1], request[2], request[3]
local queues, queue_of, copies = request[6], request[7], request[8]
local asks, ask_of = request[9], request[10]
local statuses, places, granted = {}, {}, {} -- granted: the indexes of granted entries, each copy once
local found = {}
local lines, is_held_up = request[12], {} -- is_held_up: the lines with a copy that was not granted
local limit, left, left_in_all, refused_before, refused_count = request[16], nil, nil, nil, 0
if limit then
  if not is_counted(subscription, limit, queues) then return cmsgpack.pack({ 'uncounted' }) end
  left, left_in_all, refused_before = vacancy(subscription, limit)
end

local function is_overtaken()
  local generation = redis.call('HGET', prefix .. 'modes', subscription)
  return generation and tonumber(generation) > request[5]
end

local function read_claims()
  local claims = redis.call('HMGET', prefix .. 'claims', unpack(queues))
  for q = 1, #queues do
    -- So that every queue with records is listed, claimed or not, and housekeeping finds them all.
    if not claims[q] then redis.call('HSET', prefix .. 'claims', queues[q], '0') end
    claims[q] = tonumber(claims[q] or 0)
  end
  return claims
end

local function grant_all()
  if is_overtaken() then
    for i = 1, #copies do statuses[i], places[i] = WRONG_MODE, 0 end
    return
  end
  if #copies == 0 then return end
  local claims = read_claims()
  found = read_batch(queues, queue_of, copies)
  begin_changes(queues)
  local decided = {} -- equal requests for equal records get one answer
  for a = 1, #asks do decided[a] = {} end
  for i = 1, #copies do
    local q = queue_of and queue_of[i] or 1
    local a = ask_of and ask_of[i] or 1
    local copy, ask = copies[i], asks[a]
    local line = lines and lines[i] or 0
    if ask[1] < claims[q] then
      statuses[i], places[i] = FENCED, 0
    elseif is_held_up[line] then
      statuses[i], places[i] = BEHIND, 0
    else
      local raw = changes[q][copy] or found[i]
      local answer = decided[a][raw]
      if not answer then
        local status, new = decide_grant(raw, lease_id, invisibility, request[4], ask[2], ask[1])
        answer = { status, new, place_of(new or raw) }
        decided[a][raw] = answer
      end
      local is_new = answer[2] and not changes[q][copy]
      if is_new and left == 0 then
        statuses[i], places[i], refused_count = FULL, 0, refused_count + 1
      else
        if is_new then
          granted[#granted + 1] = i
          if left then left, left_in_all = left - 1, left_in_all - 1 end
        end
        if answer[2] then changed(q, copy, answer[2]) end
        statuses[i], places[i] = answer[1], answer[3]
      end
    end
    if line > 0 and statuses[i] ~= GRANTED and statuses[i] ~= SETTLED then is_held_up[line] = true end
  end
end

-- The reply. If there is a limit, it also says how many more leases the asking proxy may give, and whether the limit is
-- reached.
local function reply_granted()
  if not limit then return reply(reply_records, now, statuses, places) end
  tidy(subscription, refused_before)
  if #granted + refused_count > 0 then note_refusal(subscription, limit[2], #granted == 0) end
  return reply(reply_records, now, statuses, places, left, left_in_all <= 0)
end

-- Record the attempt's leases as (queue, copy, copy, ...), ...: this batch's are added to the earlier ones of the same
-- lease.
local function note_attempt(attempt)
  local field = subscription .. '/' .. attempt
  local former = redis.call('HGET', prefix .. 'attempts', field)
  local noted = former and cmsgpack.unpack(former)
  if not noted or noted[1] ~= lease_id then noted = { lease_id } end
  for n = 1, #granted do
    local i = granted[n]
    local queue = queues[queue_of and queue_of[i] or 1]
    local run = noted[#noted]
    if #noted == 1 or run[1] ~= queue then
      run = { queue }
      noted[#noted + 1] = run
    end
    run[#run + 1] = copies[i]
  end
  redis.call('HSET', prefix .. 'attempts', field, cmsgpack.pack(noted))
  redis.call('ZADD', prefix .. 'attempt_ends', now + invisibility, field)
end
