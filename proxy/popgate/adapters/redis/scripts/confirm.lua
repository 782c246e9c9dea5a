-- Request: the topic, the entries as in reserve.
local found, confirmed = read_ids(request[1], request[2]), {}
for i = 1, #request[2] do
  local known = found[i]
  if known and known[1] == request[2][i][2] and not known[5] then
    known[5] = true
    confirmed[#confirmed + 1] = request[2][i][1]
    confirmed[#confirmed + 1] = cmsgpack.pack(known)
  end
end
call_all('HSET', ids_key(request[1]), confirmed)
return cmsgpack.pack(true)
