if is_member() then
  remove({me})
else
  redis.call('ZREM', beats, me) -- it may have asked to join, and had to wait
end
return cmsgpack.pack(current())
