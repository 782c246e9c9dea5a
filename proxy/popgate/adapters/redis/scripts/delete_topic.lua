-- Request: the topic.
redis.call('HDEL', prefix .. 'topics', request[1])
local start, groups = request[1] .. '/', {}
for _, name in ipairs(redis.call('HKEYS', prefix .. 'topic_groups')) do
  if name:sub(1, #start) == start then groups[#groups + 1] = name end
end
call_all('HDEL', prefix .. 'topic_groups', groups)
