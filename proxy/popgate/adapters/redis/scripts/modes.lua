-- The mode generation that grants of a subscription need.
--
-- Keys:
--   modes  hash by subscription

local function needed_generation(subscription)
  return tonumber(redis.call('HGET', key_of('modes'), subscription) or 0)
end

local function is_overtaken(subscription, generation) return needed_generation(subscription) > generation end

-- Require this generation, or a later one that is required already. Return the one that is required now.
local function allow_mode(subscription, generation)
  local needed = needed_generation(subscription)
  if needed < generation then
    needed = generation
    redis.call('HSET', key_of('modes'), subscription, digits(needed))
  end
  return cmsgpack.pack(needed)
end
