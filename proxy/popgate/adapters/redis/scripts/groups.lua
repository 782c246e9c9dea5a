-- Lease groups. Each subscription has one hash of its streams, (watermark, acked, lost, time of the last change), and
-- one of its groups, by stream and epoch. Each group has one hash of its members by position and, while it is being
-- formed, one of the positions by copy. A lost member is removed from these hashes. Epochs and watermarks are decimal
-- digits of equal length, because they may exceed the integers that Lua's numbers hold exactly.
local FORMING, FROZEN, RELEASING = 0, 1, 2
local NOT_LEASED = 4503599627370496 -- 2^52: when the leases of a group without members end
local FOREVER = 4503599627370496

local function streams_key(of) return prefix .. 'streams:' .. of end
local function groups_key(of) return prefix .. 'groups:' .. of end
local function members_key(group) return prefix .. 'members:' .. group.id end
local function places_key(group) return prefix .. 'places:' .. group.id end

-- A refusal in place of a reply: it begins with a word, and no reply does.
local function refusal(...) return cmsgpack.pack({ ... }) end

local function read_stream(of, stream)
  local raw = redis.call('HGET', streams_key(of), stream)
  return raw and cmsgpack.unpack(raw)
end

local function write_stream(of, stream, row)
  redis.call('HSET', streams_key(of), stream, cmsgpack.pack(row))
  redis.call('SADD', prefix .. 'group_homes', of)
end

local function unpack_group(raw)
  local t = cmsgpack.unpack(raw)
  return {
    id = t[1], state = t[2], lease_id = t[3], builder = t[4], slices = t[5], span = t[6], count = t[7], lost = t[8],
    ends_at = t[9], created_at = t[10], held_since = t[11],
    first = t[12], -- lower positions are settled
  }
end

-- key: subscription, stream, epoch.
local function write_group(key, g)
  redis.call('HSET', groups_key(key[1]), key[2] .. '/' .. key[3], cmsgpack.pack({
    g.id, g.state, g.lease_id, g.builder, g.slices, g.span, g.count, g.lost, g.ends_at, g.created_at, g.held_since,
    g.first,
  }))
end

local function delete_group(key, group)
  redis.call('UNLINK', members_key(group), places_key(group))
  redis.call('HDEL', groups_key(key[1]), key[2] .. '/' .. key[3])
end

-- A StoredGroup of the port.
local function stored(g)
  return { now, g.state, g.lease_id, g.slices, g.span, g.count, g.lost, g.ends_at, g.created_at, g.held_since }
end

-- The group or nil, and a refusal if its epoch was acked.
local function find_group(key)
  local row = read_stream(key[1], key[2])
  if not row then return nil end
  if key[3] <= row[1] then return nil, refusal('acked', row[1]) end
  local raw = redis.call('HGET', groups_key(key[1]), key[2] .. '/' .. key[3])
  return raw and unpack_group(raw) or nil
end

-- The group, or nil and a refusal.
local function found_group(key)
  local group, refused = find_group(key)
  if refused then return nil, refused end
  if not group or group.state == RELEASING then return nil, refusal('missing') end
  return group
end

-- The group that this builder is forming, or nil and a refusal.
local function formed_group(key, builder)
  local group, refused = find_group(key)
  if refused then return nil, refused end
  if not group or group.state ~= FORMING or group.builder ~= builder then return nil, refusal('taken') end
  return group
end

-- Calls visit(stream, epoch, group) for each group of a subscription, or of one of its streams.
local function each_group(of, stream, visit)
  local all = redis.call('HGETALL', groups_key(of))
  for i = 1, #all, 2 do
    local slash = all[i]:find('/', 1, true)
    local name, epoch = all[i]:sub(1, slash - 1), all[i]:sub(slash + 1)
    if not stream or name == stream then visit(name, epoch, unpack_group(all[i + 1])) end
  end
end
