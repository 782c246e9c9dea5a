-- members: what each says of itself. beats: when it last proved that it lives. owners: of which queue. version: of all.
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

-- Everybody who proves to live looks who has not for too long.
local function beat(silent_seconds)
  redis.call('ZADD', beats, now, me)
  local silent = redis.call('ZRANGEBYSCORE', beats, '-inf', now - silent_seconds * 1000000)
  if #silent > 0 then
    remove(silent)
  end
end

local function view()
  return cmsgpack.pack({current(), redis.call('HGETALL', members), redis.call('HGETALL', owners)})
end
