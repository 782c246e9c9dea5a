-- Request: the topic, the window, (dedup id, copy id, message id, queue index) of each entry. Returns existing ids:
-- (index of the entry, copy id, message id, queue index, whether it is confirmed) each.
local topic, window, entries = request[1], request[2], request[3]
local found = read_ids(topic, entries)
local standing, new, order, repeated = {}, {}, {}, {}
for i = 1, #entries do
  local id, copy, message, index = unpack(entries[i])
  local known = found[i]
  if not known or known[4] <= now - window then
    new[#new + 1] = id
    new[#new + 1] = cmsgpack.pack({ copy, message ~= copy and message, index, now, false })
    order[#order + 1] = cmsgpack.pack({ now, topic, id })
  elseif known[5] or known[1] ~= copy then
    standing[#standing + 1] = { i, known[1], known[2] or known[1], known[3], known[5] }
    if not known[5] then -- the broker may hold it twice: trim.lua keeps its settled record
      repeated[#repeated + 1] = now
      repeated[#repeated + 1] = known[1]
    end
  end
end
call_all('HSET', ids_key(topic), new)
call_all('RPUSH', prefix .. 'dedup_order', order)
call_all('ZADD', prefix .. 'repeated', repeated)
return cmsgpack.pack(standing)
