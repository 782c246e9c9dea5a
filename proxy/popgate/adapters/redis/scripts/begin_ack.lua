-- Request: the subscription, the stream, the epoch, the minimum time between two writes of acks that bring no change.
local row = read_stream(request[1], request[2])
if not row or request[3] > row[1] then
  write_stream(request[1], request[2], { request[3], 0, 0, now })
  return cmsgpack.pack({ 0, 0 })
end
if row[4] < now - request[4] then
  row[4] = now
  write_stream(request[1], request[2], row)
end
return cmsgpack.pack(request[3] == row[1] and { row[2], row[3] } or { 0, 0 })
