-- The most common batch: new copies, each once, of claimed queues. It is decided as in granting.lua, at half the cost;
-- any other batch falls through to it. Request: see granting.lua.
local function grant_new()
  local queues, queue_of, copies, asks, ask_of = request[6], request[7], request[8], request[9], request[10]
  if not request[13] or request[14] or request[16] or request[12] or has_limits or #copies == 0 then return end
  local generation = redis.call('HGET', prefix .. 'modes', request[1])
  if generation and tonumber(generation) > request[5] then return end
  local attempt = request[11] and request[1] .. '/' .. request[11]
  if attempt and redis.call('HEXISTS', prefix .. 'attempts', attempt) == 1 then return end

  local raws, fields, written = {}, {}, {}
  for a = 1, #asks do
    local _, raw = decide_grant(false, request[2], request[3], request[4], asks[a][2], asks[a][1])
    raws[a] = raw
  end
  local claims = redis.call('HMGET', prefix .. 'claims', unpack(queues))
  for q = 1, #queues do
    if not claims[q] then return end
    claims[q], fields[q], written[q] = tonumber(claims[q]), queue_of and {} or copies, {}
  end
  local q, a, of_queue, to_write = 1, 1, fields[1], written[1]
  for i = 1, #copies do
    local copy = copies[i]
    if queue_of then
      q = queue_of[i]
      of_queue, to_write = fields[q], written[q]
      of_queue[#of_queue + 1] = copy
    end
    if ask_of then a = ask_of[i] end
    if asks[a][1] < claims[q] then return end
    local n = #to_write
    to_write[n + 1], to_write[n + 2] = copy, raws[a]
  end
  for of = 1, #queues do
    if not (is_new(live_key(queues[of]), fields[of]) and is_new(settled_key(queues[of]), fields[of])) then return end
  end

  for of = 1, #queues do call_all('HSET', live_key(queues[of]), written[of]) end
  if attempt then
    local noted = { request[2] }
    for of = 1, #queues do noted[of + 1] = { queues[of], unpack(fields[of]) } end
    redis.call('HSET', prefix .. 'attempts', attempt, cmsgpack.pack(noted))
    redis.call('ZADD', prefix .. 'attempt_ends', now + request[3], attempt)
  end
  return reply(raws, now, GRANTED, ask_of or 1)
end

local answered = grant_new()
if answered then return answered end
