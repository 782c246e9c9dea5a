-- max_in_flight: at most so many leases of a subscription at a time, over all queues and proxies. They are counted where
-- records are written (records.lua), so that the count is never another than that of the leases.
-- limits: there where any subscription is limited. limited: by queue, which subscription counts it. counted: by
-- subscription, how many queues it has; there once the leases that were there before are counted. counting: since when
-- they are being counted. refused: of a subscription, by proxy, since when it gets nothing, and when it asked last.
-- A limit is (the most in flight, who asks, how many queues there are).
local TURN, ASKS = 200000, 500000 -- microseconds

local function refused_key(name) return prefix .. 'refused:' .. name end

-- queues: those that are about to be leased from. They may be others than before, and as many.
local function is_counted(name, limit, queues)
  if redis.call('HGET', prefix .. 'counted', name) ~= tostring(limit[3]) then return false end
  local counted = #queues > 0 and redis.call('HMGET', prefix .. 'limited', unpack(queues)) or {}
  for q = 1, #queues do
    if counted[q] ~= name then return false end
  end
  return true
end

-- Who asks has got something, or nothing: since then, and until it does, it stands in line, as long as it asks again.
local function note_refusal(name, me, is_refused)
  local key = refused_key(name)
  if not is_refused then
    redis.call('HDEL', key, me)
    return
  end
  local known = redis.call('HGET', key, me)
  redis.call('HSET', key, me, cmsgpack.pack({ known and cmsgpack.unpack(known)[1] or now, now }))
end

-- Forget who does not ask any more, and the leases that are over.
local function tidy(name, refused)
  redis.call('ZREMRANGEBYSCORE', out_key(name), '-inf', now)
  for at = 1, #refused, 2 do
    if cmsgpack.unpack(refused[at + 1])[2] < now - ASKS then redis.call('HDEL', refused_key(name), refused[at]) end
  end
end

-- How many more leases may be given to who asks, and how many in all; and who is refused, for tidy. Who gives leases while
-- others are refused goes on for a turn; then there is one less for each that has stood in line for longer, so that no
-- proxy's queues starve. Nothing is written here: a Redis whose memory is full refuses a script's first write only.
local function vacancy(name, limit)
  local all = limit[1] - redis.call('ZCOUNT', out_key(name), '(' .. string.format('%.0f', now), '+inf')
  local refused = redis.call('HGETALL', refused_key(name))
  local since = {}
  for at = 1, #refused, 2 do
    local noted = cmsgpack.unpack(refused[at + 1])
    if noted[2] >= now - ASKS then since[refused[at]] = noted[1] end
  end
  local mine, me, own = all, limit[2], since[limit[2]]
  for member, other in pairs(since) do
    local is_before = not own or other < own or (other == own and member < me)
    if member ~= me and other <= now - TURN and is_before then mine = mine - 1 end
  end
  return math.max(0, mine), all, refused
end
