-- Lease groups: forming and finding them, and the watermarks of their streams. members.lua has their members.
--
-- Keys:
--   streams:<subscription>  hash by stream: (watermark, acked, lost, time of the last change)
--   groups:<subscription>   hash by "stream/epoch": (id, state, lease id, builder, slices, span, count, lost, ends_at,
--                           created_at, held_since, first)
--   members:<id>            hash by position: the members of a group; a lost member is removed
--   places:<id>             hash by copy: the positions, while the group is being formed
--   group_id                the last id of a group
--   group_homes             set of the subscriptions with streams
-- Arguments: of is a subscription, group_key is (subscription, stream, epoch); times are microseconds. Epochs and
-- watermarks are decimal digits of equal length, because they may exceed the integers that Lua's numbers hold exactly.
local FORMING, FROZEN, RELEASING = 0, 1, 2

-- A refusal in place of a reply: it begins with a word, and no reply does.
local function refusal(...) return cmsgpack.pack({ ... }) end

local function unpack_stream(raw)
  local watermark, acked, lost, changed_at = unpack(cmsgpack.unpack(raw))
  return { watermark = watermark, acked = acked, lost = lost, changed_at = changed_at }
end

local function read_stream(of, stream)
  local raw = redis.call('HGET', key_of('streams', of), stream)
  return raw and unpack_stream(raw)
end

-- streams_max: the maximum number of streams of a subscription.
local function may_have(of, stream, streams_max)
  local streams = key_of('streams', of)
  return redis.call('HEXISTS', streams, stream) == 1 or redis.call('HLEN', streams) < streams_max
end

local function write_stream(of, stream, s)
  redis.call('HSET', key_of('streams', of), stream, cmsgpack.pack({ s.watermark, s.acked, s.lost, s.changed_at }))
  redis.call('SADD', key_of('group_homes'), of)
end

local function unpack_group(raw)
  local id, state, lease_id, builder, slices, span, count, lost, ends_at, created_at, held_since, first =
    unpack(cmsgpack.unpack(raw))
  return {
    id = id, state = state, lease_id = lease_id, builder = builder, slices = slices, span = span, count = count,
    lost = lost, ends_at = ends_at, created_at = created_at, held_since = held_since,
    first = first, -- lower positions are settled
  }
end

local function write_group(group_key, g)
  local of, stream, epoch = unpack(group_key)
  redis.call('HSET', key_of('groups', of), stream .. '/' .. epoch, cmsgpack.pack({
    g.id, g.state, g.lease_id, g.builder, g.slices, g.span, g.count, g.lost, g.ends_at, g.created_at, g.held_since,
    g.first,
  }))
end

local function drop_members(group) redis.call('UNLINK', key_of('members', group.id), key_of('places', group.id)) end

local function delete_group(group_key, group)
  local of, stream, epoch = unpack(group_key)
  drop_members(group)
  redis.call('HDEL', key_of('groups', of), stream .. '/' .. epoch)
end

-- A StoredGroup of the port.
local function stored(g)
  return { now, g.state, g.lease_id, g.slices, g.span, g.count, g.lost, g.ends_at, g.created_at, g.held_since }
end

-- The group or nil, and a refusal if its epoch was acked.
local function present_group(group_key)
  local of, stream, epoch = unpack(group_key)
  local s = read_stream(of, stream)
  if not s then return nil end
  if epoch <= s.watermark then return nil, refusal('acked', s.watermark) end
  local raw = redis.call('HGET', key_of('groups', of), stream .. '/' .. epoch)
  return raw and unpack_group(raw) or nil
end

-- The group, or nil and a refusal.
local function found_group(group_key)
  local group, refused = present_group(group_key)
  if group and group.state ~= RELEASING then return group end
  return nil, refused or refusal('missing')
end

-- The group that this builder is forming, or nil and a refusal.
local function formed_group(group_key, builder)
  local group, refused = present_group(group_key)
  if group and group.state == FORMING and group.builder == builder then return group end
  return nil, refused or refusal('taken')
end

-- Call visit(group, group_key, stream, epoch) for each group of a subscription, or of one of its streams, that can be
-- read.
local function each_group(of, stream, visit)
  local all = redis.call('HGETALL', key_of('groups', of))
  for i = 1, #all, 2 do
    local name, epoch = all[i]:match('^([^/]*)/(.*)$')
    if name and (not stream or name == stream) then
      local is_unpacked, group = pcall(unpack_group, all[i + 1])
      if is_unpacked and group.first then visit(group, { of, name, epoch }, name, epoch) end
    end
  end
end

-- Returns watermark_of(stream), which reads each stream once. The watermark of a stream that can't be read is below all
-- epochs.
local function watermarks(of)
  return setmetatable({}, { __index = function(known, stream)
    local is_unpacked, s = pcall(read_stream, of, stream)
    known[stream] = is_unpacked and s and s.watermark or ''
    return known[stream]
  end })
end

-- groups_max: the maximum number of groups of a subscription.
local function begin_group(group_key, lease_id, builder, slices, groups_max, streams_max)
  local group, refused = present_group(group_key)
  if refused then return refused end
  local of, stream, epoch = unpack(group_key)
  if not group then
    if redis.call('HLEN', key_of('groups', of)) >= groups_max then return refusal('full') end
    if not may_have(of, stream, streams_max) then return refusal('crowded') end
    if not read_stream(of, stream) then
      write_stream(of, stream, { watermark = ('0'):rep(#epoch), acked = 0, lost = 0, changed_at = now })
    end
    group = {
      id = redis.call('INCR', key_of('group_id')), state = FORMING, lease_id = lease_id, builder = builder,
      slices = slices, span = 0, count = 0, lost = 0, ends_at = FOREVER, created_at = now, held_since = now, first = 0,
    }
    write_group(group_key, group)
  elseif group.state == FORMING then
    group.builder, group.slices = builder, slices
    write_group(group_key, group)
  end
  return cmsgpack.pack(stored(group))
end

-- Returns the time without a group if the group has no members and was deleted.
local function freeze_group(group_key, builder)
  local group, refused = formed_group(group_key, builder)
  if refused then return refused end
  if group.count == 0 then
    delete_group(group_key, group)
    return cmsgpack.pack({ now })
  end
  group.state = FROZEN
  redis.call('UNLINK', key_of('places', group.id))
  write_group(group_key, group)
  return cmsgpack.pack(stored(group))
end

-- Returns the time without a group if there is none.
local function find_group(group_key)
  local group, refused = present_group(group_key)
  return refused or cmsgpack.pack(group and stored(group) or { now })
end

-- Returns (stream, epoch, group) of each group that is not acked. stream: or false for all.
local function list_groups(of, stream)
  local found, watermark_of = {}, watermarks(of)
  each_group(of, stream, function(group, _, name, epoch)
    if epoch > watermark_of[name] then found[#found + 1] = { name, epoch, stored(group) } end
  end)
  return cmsgpack.pack(found)
end

-- Count the members at positions [first, past), one step of limit positions. Returns the count, and where to go on.
local function count_members(group_key, first, past, limit)
  local group, refused = found_group(group_key)
  if refused then return refused end
  first, past = math.max(first, group.first), math.min(past, group.span)
  if group.count == group.span then return cmsgpack.pack({ math.max(0, past - first), false }) end
  local stop, positions, count = math.min(first + limit, past), {}, 0
  for position = first, stop - 1 do positions[#positions + 1] = position end
  for _, member in ipairs(read_fields(key_of('members', group.id), positions)) do
    if member then count = count + 1 end
  end
  return cmsgpack.pack({ count, stop < past and stop })
end

-- Returns the latest end of the leases of a renewal.
local function begin_renewal(group_key, duration, age_max)
  local group, refused = found_group(group_key)
  if refused then return refused end
  if group.ends_at <= now then
    group.held_since = now
    write_group(group_key, group)
  end
  return cmsgpack.pack({ math.min(now + duration, group.held_since + age_max) })
end

-- Ack the stream through an epoch. An ack that brings no change is written only if the last write is so old. Returns
-- how many members were acked and lost until now.
local function begin_ack(of, stream, epoch, pause, streams_max)
  if not may_have(of, stream, streams_max) then return refusal('crowded') end
  local s = read_stream(of, stream)
  if not s or epoch > s.watermark then
    write_stream(of, stream, { watermark = epoch, acked = 0, lost = 0, changed_at = now })
    return cmsgpack.pack({ 0, 0 })
  end
  if s.changed_at < now - pause then
    s.changed_at = now
    write_stream(of, stream, s)
  end
  return cmsgpack.pack(epoch == s.watermark and { s.acked, s.lost } or { 0, 0 })
end

-- Release the groups after an epoch. Epochs up to the watermark are acked and can't be released.
local function begin_release(of, stream, after)
  local s = read_stream(of, stream)
  if s then
    if after < s.watermark then after = s.watermark end
    each_group(of, stream, function(group, group_key, _, epoch)
      if epoch > after then
        group.state = RELEASING
        write_group(group_key, group)
      end
    end)
  end
  return cmsgpack.pack(true)
end

-- The subscriptions that have streams.
local function group_homes() return cmsgpack.pack(redis.call('SMEMBERS', key_of('group_homes'))) end

-- The streams for which settle_next has something to do.
local function half_settled(of)
  local streams, seen, watermark_of = {}, {}, watermarks(of)
  each_group(of, false, function(group, _, stream, epoch)
    if not seen[stream] and (epoch <= watermark_of[stream] or group.state == RELEASING) then
      seen[stream] = true
      streams[#streams + 1] = stream
    end
  end)
  return cmsgpack.pack(streams)
end

-- Release abandoned groups, and forget streams without groups that have not changed. The ages are the limits of groups
-- that are being formed, and of all other groups and streams.
local function collect_groups(of, forming_age, age)
  local formed_before, ended_before, is_used = now - forming_age, now - age, {}
  each_group(of, false, function(group, group_key, stream)
    is_used[stream] = true
    local is_left = group.ends_at < ended_before
    if group.state == FORMING then
      is_left = is_left or group.ends_at < formed_before or (group.span == 0 and group.created_at < formed_before)
    end
    if is_left and group.state ~= RELEASING then
      group.state = RELEASING
      write_group(group_key, group)
    end
  end)
  local streams = redis.call('HGETALL', key_of('streams', of))
  for i = 1, #streams, 2 do
    local is_unpacked, s = pcall(unpack_stream, streams[i + 1])
    if is_unpacked and not is_used[streams[i]] and s.changed_at and s.changed_at < ended_before then
      redis.call('HDEL', key_of('streams', of), streams[i])
    end
  end
  if redis.call('EXISTS', key_of('streams', of)) == 0 then redis.call('SREM', key_of('group_homes'), of) end
  return cmsgpack.pack(true)
end

local function drop_groups(of)
  each_group(of, false, drop_members)
  redis.call('UNLINK', key_of('groups', of), key_of('streams', of))
  redis.call('SREM', key_of('group_homes'), of)
  return cmsgpack.pack(true)
end
