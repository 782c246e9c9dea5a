-- The assignments of pull clients.
--
-- Keys:
--   assignments          hash of JSON by subscription
--   assignment_versions  hash of their versions
local versions, assignments = key_of('assignment_versions'), key_of('assignments')

local function version_of(subscription) return tonumber(redis.call('HGET', versions, subscription) or 0) end

local function read_assignment(subscription)
  return cmsgpack.pack({ version_of(subscription), redis.call('HGET', assignments, subscription) or '' })
end

-- replaces: the version that is stored. Returns the new version, or 0 if another one is stored. A version never
-- repeats, even after drop_assignment.
local function write_assignment(subscription, assignment, replaces)
  if version_of(subscription) ~= replaces then return cmsgpack.pack(0) end
  local version = next_version(replaces)
  redis.call('HSET', assignments, subscription, assignment)
  redis.call('HSET', versions, subscription, digits(version))
  return cmsgpack.pack(version)
end

local function drop_assignment(subscription)
  redis.call('HDEL', assignments, subscription)
  redis.call('HDEL', versions, subscription)
  return cmsgpack.pack(true)
end
