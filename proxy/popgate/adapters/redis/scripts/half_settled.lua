-- Request: the subscription. Returns the streams for which settle_next has something to do.
local streams, watermarks, seen = {}, {}, {}
each_group(request[1], false, function(stream, epoch, group)
  if not watermarks[stream] then watermarks[stream] = read_stream(request[1], stream)[1] end
  if not seen[stream] and (epoch <= watermarks[stream] or group.state == RELEASING) then
    seen[stream] = true
    streams[#streams + 1] = stream
  end
end)
return cmsgpack.pack(streams)
