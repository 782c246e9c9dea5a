-- max_in_flight: the maximum number of leases of a subscription at a time, over all queues and proxies. Leases are
-- counted when records are written (records.lua), so the count always agrees with the leases.
-- limits: exists if any subscription is limited. limited: by queue, the subscription that counts its leases. counted:
-- by subscription, its number of queues; exists once all older leases are counted. counting: when that counting began.
-- refused: of a subscription, by proxy, (since when it has been refused, when it asked last).
-- A limit is (maximum in flight, asking proxy, number of queues).
local TURN, ASKS = 200000, 500000 -- microseconds

local function refused_key(name) return prefix .. 'refused:' .. name end

-- queues: those of this grant. They may be other queues than before, but equally many.
local function is_counted(name, limit, queues)
  if redis.call('HGET', prefix .. 'counted', name) ~= tostring(limit[3]) then return false end
  local counted = #queues > 0 and redis.call('HMGET', prefix .. 'limited', unpack(queues)) or {}
  for q = 1, #queues do
    if counted[q] ~= name then return false end
  end
  return true
end

-- Note whether the asking proxy was refused. From then on until it gets a lease it stands in line, as long as it keeps
-- asking.
local function note_refusal(name, me, is_refused)
  local key = refused_key(name)
  if not is_refused then
    redis.call('HDEL', key, me)
    return
  end
  local known = redis.call('HGET', key, me)
  redis.call('HSET', key, me, cmsgpack.pack({ known and cmsgpack.unpack(known)[1] or now, now }))
end

-- Forget proxies that have stopped asking, and ended leases.
local function tidy(name, refused)
  redis.call('ZREMRANGEBYSCORE', out_key(name), '-inf', now)
  for at = 1, #refused, 2 do
    if cmsgpack.unpack(refused[at + 1])[2] < now - ASKS then redis.call('HDEL', refused_key(name), refused[at]) end
  end
end

-- Returns how many more leases the asking proxy may give, how many there are in all, and the refused proxies, for tidy.
-- A proxy that gives leases while others are refused may go on for a TURN. After that, one lease less is left for it
-- per proxy that has stood in line for longer, so that no proxy's queues starve. Nothing is written here, because when
-- its memory is full, Redis refuses only the first write of a script.
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
