if is_member() then
  remove({me})
else
  redis.call('ZREM', beats, me) -- it may have asked to join and been refused
end
return cmsgpack.pack(current())
