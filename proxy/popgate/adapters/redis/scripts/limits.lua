-- max_in_flight: the maximum number of leases of a subscription at a time, over all queues and proxies. Leases are
-- counted when records are written (records.lua), so the count always agrees with the leases.
--
-- Keys (limited and out:<subscription> are in records.lua):
--   limits                  exists if any subscription is limited
--   counted                 hash by subscription: its number of queues, once all older leases are counted
--   counting                hash by subscription: when that counting began
--   refused:<subscription>  hash by proxy: (since when it has been refused, when it asked last)
-- Arguments: a limit is (maximum in flight, asking proxy, number of queues).
local TURN, ASKS = 200000, 500000 -- microseconds

-- Returns 'uncounted' in place of a reply, unless all leases of these queues of the subscription are counted. They may
-- be other queues than before, but equally many.
local function uncounted_reply(subscription, queue_count, queues)
  local is_counted = redis.call('HGET', key_of('counted'), subscription) == tostring(queue_count)
  local counts = read_fields(key_of('limited'), queues)
  for q = 1, #queues do is_counted = is_counted and counts[q] == subscription end
  return not is_counted and cmsgpack.pack({ 'uncounted' })
end

-- Note whether the asking proxy was refused. From then on until it gets a lease it stands in line, as long as it keeps
-- asking.
local function note_refusal(subscription, proxy, is_refused)
  local key = key_of('refused', subscription)
  if not is_refused then
    redis.call('HDEL', key, proxy)
    return
  end
  local known = redis.call('HGET', key, proxy)
  redis.call('HSET', key, proxy, cmsgpack.pack({ known and cmsgpack.unpack(known)[1] or now, now }))
end

-- Returns how many more leases the asking proxy may give, how many there are in all, and the proxies that have stopped
-- asking, for tidy. A proxy that gives leases while others are refused may go on for a TURN. After that, one lease less
-- is left for it per proxy that has stood in line for longer, so that no proxy's queues starve. Nothing is written
-- here, because when its memory is full, Redis refuses only the first write of a script.
local function vacancy_of(subscription, in_flight_max, me)
  local all = in_flight_max - redis.call('ZCOUNT', key_of('out', subscription), '(' .. digits(now), '+inf')
  local refused, since, gone = redis.call('HGETALL', key_of('refused', subscription)), {}, {}
  for i = 1, #refused, 2 do
    local refused_at, asked_at = unpack(cmsgpack.unpack(refused[i + 1]))
    if asked_at < now - ASKS then gone[#gone + 1] = refused[i] else since[refused[i]] = refused_at end
  end
  local mine, own = all, since[me]
  for proxy, other in pairs(since) do
    local is_before = not own or other < own or (other == own and proxy < me)
    if proxy ~= me and other <= now - TURN and is_before then mine = mine - 1 end
  end
  return math.max(0, mine), all, gone
end

-- Forget ended leases and the proxies that have stopped asking.
local function tidy(subscription, gone)
  redis.call('ZREMRANGEBYSCORE', key_of('out', subscription), '-inf', now)
  call_all('HDEL', key_of('refused', subscription), gone)
end

-- Grant one pop batch within a limit: granting.lua has the other arguments. The reply also says how many more leases
-- the asking proxy may give, and whether the limit is reached.
local function grant_within(limit, add_members, subscription, queues, ...)
  local in_flight_max, me, queue_count = unpack(limit)
  local refusal = uncounted_reply(subscription, queue_count, queues)
  if refusal then return refusal end
  local left, all, gone = vacancy_of(subscription, in_flight_max, me)
  local statuses, places, granted, full = grant_batch(left, add_members, subscription, queues, ...)
  tidy(subscription, gone)
  if granted + full > 0 then note_refusal(subscription, me, granted == 0) end
  return reply(statuses, places, left - granted, all <= granted)
end

-- waits: a client waits for the limit. Returns how many more leases the proxy may give, and whether the limit is
-- reached.
local function vacancy(subscription, limit, waits)
  local in_flight_max, me, queue_count = unpack(limit)
  local refusal = uncounted_reply(subscription, queue_count, {})
  if refusal then return refusal end
  local mine, all, gone = vacancy_of(subscription, in_flight_max, me)
  tidy(subscription, gone)
  if waits and (mine == 0 or redis.call('HEXISTS', key_of('refused', subscription), me) == 1) then
    note_refusal(subscription, me, true)
  end
  return cmsgpack.pack({ mine, all <= 0 })
end

-- Count the leases in these queues from now on, as they are written. Returns whether existing leases may be counted:
-- not before each queue has been claimed, because after a data loss its owner may still have to write back its leases;
-- patience limits that wait, in microseconds.
local function begin_count(subscription, queues, patience)
  local limited = redis.call('HGETALL', key_of('limited'))
  for i = 1, #limited, 2 do
    if limited[i + 1] == subscription then redis.call('HDEL', key_of('limited'), limited[i]) end
  end
  for q = 1, #queues do redis.call('HSET', key_of('limited'), queues[q], subscription) end
  redis.call('SET', key_of('limits'), '1')
  redis.call('HSETNX', key_of('counting'), subscription, digits(now))
  local may_count = true
  if now - tonumber(redis.call('HGET', key_of('counting'), subscription)) <= patience then
    local claims = read_fields(key_of('claims'), queues)
    for q = 1, #queues do may_count = may_count and tonumber(claims[q] or 0) ~= 0 end
  end
  return cmsgpack.pack(may_count)
end

-- Count the leases among the next size records of a queue. Returns the next cursor.
local function count_part(subscription, queue, cursor, size)
  local next_cursor, part = unpack(redis.call('HSCAN', key_of('live', queue), cursor, 'COUNT', size))
  local leased = {}
  for i = 1, #part, 2 do
    local visible_at = state_of(part[i + 1]) == LEASED and unpack_record(part[i + 1]).visible_at
    if visible_at and visible_at > now then
      leased[#leased + 1] = visible_at
      leased[#leased + 1] = out_member(queue, part[i])
    end
  end
  call_all('ZADD', key_of('out', subscription), leased)
  return cmsgpack.pack(next_cursor)
end

-- All older leases are counted. Returns whether the queues are still those of the subscription.
local function end_count(subscription, queues)
  local counts = read_fields(key_of('limited'), queues)
  for q = 1, #queues do
    if counts[q] ~= subscription then return cmsgpack.pack(false) end
  end
  redis.call('HDEL', key_of('counting'), subscription)
  redis.call('HSET', key_of('counted'), subscription, #queues)
  return cmsgpack.pack(true)
end

-- Stop counting for all subscriptions but these.
local function keep_limits(subscriptions)
  local is_kept = {}
  for _, subscription in ipairs(subscriptions) do is_kept[subscription] = true end
  local limited = redis.call('HGETALL', key_of('limited'))
  for i = 1, #limited, 2 do
    local queue, subscription = limited[i], limited[i + 1]
    if not is_kept[subscription] then
      redis.call('HDEL', key_of('limited'), queue)
      redis.call('HDEL', key_of('counted'), subscription)
      redis.call('HDEL', key_of('counting'), subscription)
      redis.call('UNLINK', key_of('out', subscription), key_of('refused', subscription))
    end
  end
  if redis.call('EXISTS', key_of('limited')) == 0 then redis.call('DEL', key_of('limits')) end
  return cmsgpack.pack(true)
end
