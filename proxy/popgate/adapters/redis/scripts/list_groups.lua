-- Request: the subscription, a stream or false. Returns (stream, epoch, group) of each group that is not acked.
local found, watermarks = {}, {}
each_group(request[1], request[2], function(stream, epoch, group)
  if not watermarks[stream] then watermarks[stream] = read_stream(request[1], stream)[1] end
  if epoch > watermarks[stream] then found[#found + 1] = { stream, epoch, stored(group) } end
end)
return cmsgpack.pack(found)
