-- Request: the topic, the entries as in reserve. A repeated entry may be stored by now, and stays.
local found, cancelled = read_ids(request[1], request[2]), {}
for i = 1, #request[2] do
  local known = found[i]
  if known and known[1] == request[2][i][2] and not known[5]
    and not redis.call('ZSCORE', prefix .. 'repeated', known[1]) then
    cancelled[#cancelled + 1] = request[2][i][1]
  end
end
call_all('HDEL', ids_key(request[1]), cancelled)
return cmsgpack.pack(true)
