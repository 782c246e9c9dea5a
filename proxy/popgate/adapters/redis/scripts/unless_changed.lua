-- Request: ..., [4] what must stand in the field, false: nothing. Answers false, and ends here, where something else does.
if redis.call('HGET', prefix .. request[1], request[2]) ~= request[4] then return cmsgpack.pack(false) end
