-- Request: the subscription, the stream, the epoch. Epochs up to the watermark are acked and can't be released.
local row = read_stream(request[1], request[2])
if row then
  local after = request[3] > row[1] and request[3] or row[1]
  each_group(request[1], request[2], function(stream, epoch, group)
    if epoch > after then
      group.state = RELEASING
      write_group({ request[1], stream, epoch }, group)
    end
  end)
end
return cmsgpack.pack(true)
