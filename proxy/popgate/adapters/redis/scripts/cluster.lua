-- members: what each says of itself. beats: when it last proved that it lives. owners: of which queue. version: of all.
-- heard: since when somebody has beaten all the time.
local members, beats, owners = prefix .. 'members', prefix .. 'beats', prefix .. 'owners'
local version = prefix .. 'view'
local me = request[1]

local function current()
  return tonumber(redis.call('GET', version) or '0')
end

local function changed()
  redis.call('PUBLISH', prefix .. 'changes', redis.call('INCR', version))
end

local function remove(gone)
  local is_gone = {}
  for _, instance in ipairs(gone) do
    is_gone[instance] = true
    redis.call('HDEL', members, instance)
    redis.call('ZREM', beats, instance)
  end
  local owned = redis.call('HGETALL', owners)
  for at = 1, #owned, 2 do
    if is_gone[owned[at + 1]] then
      redis.call('HDEL', owners, owned[at])
    end
  end
  changed()
end

local function is_member()
  return redis.call('HEXISTS', members, me) == 1
end

-- Everybody who proves to live looks who has not for too long. Where nobody has for half of that time, it was Redis that
-- was away, and all who live get time to say so: whoever comes first would take all others for dead.
local function beat(silent_seconds)
  local limit = silent_seconds * 1000000
  local latest = redis.call('ZREVRANGE', beats, 0, 0, 'WITHSCORES')
  if latest[2] and now - tonumber(latest[2]) > limit / 2 then
    redis.call('SET', prefix .. 'heard', string.format('%.0f', now))
  end
  redis.call('ZADD', beats, now, me)
  if now - tonumber(redis.call('GET', prefix .. 'heard') or 0) < limit then
    return
  end
  local silent = redis.call('ZRANGEBYSCORE', beats, '-inf', now - limit)
  if #silent > 0 then
    remove(silent)
  end
end

local function view()
  return cmsgpack.pack({current(), redis.call('HGETALL', members), redis.call('HGETALL', owners)})
end
