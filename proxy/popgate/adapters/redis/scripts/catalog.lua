-- The catalog, the lock definitions, and the name of the data.
--
-- Keys:
--   topics, topic_groups, locks  hashes of JSON by name
--   catalog                      the version of topics and topic_groups; the channel catalog_changes announces a change
--   next_token                   the next unused fencing token
--   incarnation                  the name of this data
-- Arguments: hash is the name of one of the hashes, field and value are what it holds.

local function find(hash, field) return cmsgpack.pack(redis.call('HGET', key_of(hash), field) or nil) end

-- Returns fields and values alternately.
local function read(hash) return cmsgpack.pack(redis.call('HGETALL', key_of(hash))) end

local function put(hash, field, value)
  redis.call('HSET', key_of(hash), field, value)
  return cmsgpack.pack(true)
end

local function delete(hash, field)
  redis.call('HDEL', key_of(hash), field)
  return cmsgpack.pack(true)
end

-- Set the field if it is missing, and return its value.
local function add(hash, field, value)
  redis.call('HSETNX', key_of(hash), field, value)
  return find(hash, field)
end

-- Return the first of count tokens, which is not below lowest.
local function reserve_tokens(count, lowest)
  local key = key_of('next_token')
  local first = math.max(tonumber(redis.call('GET', key) or 1), lowest)
  redis.call('SET', key, digits(first + count))
  return cmsgpack.pack(first)
end

local function catalog_version() return tonumber(redis.call('GET', key_of('catalog')) or 0) end

-- Raise the catalog's version, and return it. It is written last: when its memory is full, Redis refuses a script whose
-- first write may need more, and then nothing could be deleted.
local function announce()
  local version = next_version(catalog_version())
  redis.call('SET', key_of('catalog'), digits(version))
  redis.call('PUBLISH', key_of('catalog_changes'), '')
  return cmsgpack.pack(version)
end

-- Set the field if the catalog has the version known, where false stands for any. Return the new version, or 0.
local function put_spec(hash, field, value, known)
  if known and known ~= catalog_version() then return cmsgpack.pack(0) end
  put(hash, field, value)
  return announce()
end

local function delete_spec(hash, field)
  delete(hash, field)
  return announce()
end

-- Like put_spec, if the field also has the value expected, where false stands for a missing field.
local function change_spec(hash, field, value, expected, known)
  if redis.call('HGET', key_of(hash), field) ~= expected then return cmsgpack.pack(0) end
  return put_spec(hash, field, value, known)
end

-- Delete the topic and its groups.
local function delete_topic(topic)
  delete('topics', topic)
  local start, groups = topic .. '/', {}
  for _, name in ipairs(redis.call('HKEYS', key_of('topic_groups'))) do
    if name:sub(1, #start) == start then groups[#groups + 1] = name end
  end
  call_all('HDEL', key_of('topic_groups'), groups)
  return announce()
end

-- Name the data at first use, and return its name: a caller that finds another name than it knew has detected a data
-- loss. In the same step the caller writes back the values that it remembers and no other process has, so that no
-- process sees the new data without them. values: by key; hashes: by key and field.
local function name_data(new_name, values, hashes)
  redis.call('SETNX', key_of('incarnation'), new_name)
  for key, value in pairs(values) do redis.call('SETNX', key_of(key), value) end
  local put_back = 0
  for key, fields in pairs(hashes) do
    for field, value in pairs(fields) do put_back = put_back + redis.call('HSETNX', key_of(key), field, value) end
  end
  if put_back > 0 then announce() end
  return redis.call('GET', key_of('incarnation'))
end

-- The store's time in microseconds.
local function read_time() return cmsgpack.pack(now) end
