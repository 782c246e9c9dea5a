-- members: what each member says about itself. beats: each member's last heartbeat. owners: the owner of each queue.
-- version: of the whole view. heard: start of the time in which heartbeats have arrived without a gap.
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

-- Each heartbeat also looks for members that have been silent for too long. If there was no heartbeat at all for half
-- of that time, Redis itself was away. Then all live members get time to send one; otherwise the first to come would
-- remove all others.
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
