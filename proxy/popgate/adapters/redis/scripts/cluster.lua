-- The members of the cluster and the owners of the queues.
--
-- Keys:
--   members  hash: what each member says about itself, as JSON [address, [lowest and highest version], ...]
--   beats    sorted set: the members by the times of their last heartbeats
--   owners   hash: the owner of each queue
--   view     the version of all this; the channel changes announces it
--   heard    start of the time in which heartbeats have arrived without a gap
-- Arguments: me is the calling member, silent_seconds the time without a heartbeat after which a member is removed.
local members, beats, owners, view_version = key_of('members'), key_of('beats'), key_of('owners'), key_of('view')

local function current() return tonumber(redis.call('GET', view_version) or '0') end

local function announce() redis.call('PUBLISH', key_of('changes'), redis.call('INCR', view_version)) end

local function view()
  return cmsgpack.pack({ current(), redis.call('HGETALL', members), redis.call('HGETALL', owners) })
end

local function is_member(me) return redis.call('HEXISTS', members, me) == 1 end

local function remove(gone)
  local is_gone = {}
  for _, instance in ipairs(gone) do
    is_gone[instance] = true
    redis.call('HDEL', members, instance)
    redis.call('ZREM', beats, instance)
  end
  local owned = redis.call('HGETALL', owners)
  for at = 1, #owned, 2 do
    if is_gone[owned[at + 1]] then redis.call('HDEL', owners, owned[at]) end
  end
  announce()
end

-- Date to now each heartbeat of the future, and that of each member without one. Only a clock that was set back, or
-- another program, writes such entries. Without this, their members would never be silent.
local function date_beats()
  for _, instance in ipairs(redis.call('ZRANGEBYSCORE', beats, '(' .. digits(now), '+inf')) do
    redis.call('ZADD', beats, now, instance)
  end
  for _, instance in ipairs(redis.call('HKEYS', members)) do
    if not redis.call('ZSCORE', beats, instance) then redis.call('ZADD', beats, now, instance) end
  end
end

-- Note a heartbeat, and remove the members that have been silent for too long. If there was no heartbeat at all for
-- half of that time, Redis itself was away. Then all live members get time to send one; otherwise the first to come
-- would remove all others.
local function note_beat(me, silent_seconds)
  local limit = silent_seconds * 1000000
  date_beats()
  local latest = redis.call('ZREVRANGE', beats, 0, 0, 'WITHSCORES')
  if latest[2] and now - tonumber(latest[2]) > limit / 2 then redis.call('SET', key_of('heard'), digits(now)) end
  redis.call('ZADD', beats, now, me)
  local heard = tonumber(redis.call('GET', key_of('heard')) or 0)
  if heard > now then redis.call('SET', key_of('heard'), digits(now)) end
  if now - heard < limit then return end
  local silent = redis.call('ZRANGEBYSCORE', beats, '-inf', now - limit)
  if #silent > 0 then remove(silent) end
end

-- Take those of the queues that have no owner. Return which of the queues this member owns now.
local function take(me, queues)
  local mine, taken = {}, 0
  for _, queue in ipairs(queues) do
    taken = taken + redis.call('HSETNX', owners, queue, me)
    if redis.call('HGET', owners, queue) == me then mine[#mine + 1] = queue end
  end
  if taken > 0 then announce() end
  return mine
end

-- Return the lowest and the highest version in a member's entry, or nothing if another program has damaged the entry.
local function versions(says)
  local is_json, entry = pcall(cjson.decode, says)
  if not is_json or type(entry) ~= 'table' or type(entry[1]) ~= 'string' or type(entry[2]) ~= 'table' then return end
  local lowest, highest = unpack(entry[2])
  if type(lowest) == 'number' and type(highest) == 'number' then return lowest, highest end
end

-- says: the new entry in members. queues: those that this member owns and keeps. Returns the view, in which the member
-- is missing if it has no version in common with another one. If every two version ranges overlap, all of them have a
-- version in common, so comparing with one after the other is enough.
local function join(me, silent_seconds, says, queues)
  note_beat(me, silent_seconds)
  local lowest, highest = versions(says)
  for _, other in ipairs(redis.call('HVALS', members)) do
    local their_lowest, their_highest = versions(other)
    if their_lowest and (their_lowest > highest or lowest > their_highest) then return view() end
  end
  if redis.call('HSET', members, me, says) == 1 then announce() end
  take(me, queues or {})
  return view()
end

-- known: the version of the view that the member has.
local function beat(me, silent_seconds, known)
  if not is_member(me) then return cmsgpack.pack('no member') end
  note_beat(me, silent_seconds)
  if current() == known then return cmsgpack.pack('the same') end
  return view()
end

local function own(me, queues)
  if not is_member(me) then return cmsgpack.pack('no member') end
  local mine = take(me, queues)
  return cmsgpack.pack({ mine, current() })
end

local function disown(me, queues)
  local released = 0
  for _, queue in ipairs(queues) do
    if redis.call('HGET', owners, queue) == me then released = released + redis.call('HDEL', owners, queue) end
  end
  if released > 0 then announce() end
  return cmsgpack.pack(current())
end

local function remove_member(me)
  if is_member(me) then
    remove({ me })
  else
    redis.call('ZREM', beats, me) -- it may have asked to join and been refused
  end
  return cmsgpack.pack(current())
end
